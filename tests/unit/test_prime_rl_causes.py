"""The end of a dead process's log becomes one line: what happened, where, what to try."""

from __future__ import annotations

import pytest

from nightshift.engines.prime_rl.causes import diagnose

TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 1, in <module>']


# Which process, its last line, and words of the cause and of the fix.
CONFIG_FAULTS = [
    ("trainer", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out of GPU", "seq_len"),
    ("inference", "torch.OutOfMemoryError: CUDA out of memory.", "out of GPU", "max_num_seqs"),
    ("inference", "ValueError: No available memory for the cache blocks.", "KV cache", "Raise"),
    ("orchestrator", "RuntimeError: 10 consecutive empty train batches — check algorithm credit and task difficulty.",
     "all rewards of every group were equal", "group_size"),
    ("orchestrator", "RuntimeError: 10 consecutive zero-output batch equivalents — check the curriculum admission",
     "nothing to train on", "curriculum"),
    ("orchestrator", "3 validation errors for OrchestratorConfig", "refuses the config", "Undo"),
]  # fmt: skip
OTHER_FAULTS = [
    ("inference", "ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory "
     "utilization (0.9, 71.2 GiB).", "less free memory", "gpu_memory_utilization"),
    ("env-server", "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5000')", "port", "again"),
    ("trainer", "OSError: [Errno 28] No space left on device", "disk is full", "Free space"),
    ("trainer", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94", "NCCL", "doctor"),
    ("trainer", "RuntimeError: No CUDA GPUs are available", "driver failed", "nvidia-smi"),
    ("trainer", "  traceback : Signal 9 (SIGKILL) received by PID 32703", "SIGKILL", "dmesg"),
    ("trainer", "ValueError: Flash attention 3 is only supported if the flash_attn_3 package is installed. Install",
     "attention kernel", "prepare.py"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "line", "text", "fix"), CONFIG_FAULTS + OTHER_FAULTS)
def test_known_ends_are_named(name: str, line: str, text: str, fix: str) -> None:
    cause = diagnose(name, "exit code 1", [*TRACEBACK, line, "torchrun: later noise"])
    assert cause.cause.startswith(f"{name}: ")
    assert text in cause.cause
    assert fix in cause.fix
    assert cause.is_config_fault is ((name, line, text, fix) in CONFIG_FAULTS)
    assert "\n" not in str(cause)


def test_an_unknown_end_quotes_how_it_ended_and_its_last_error() -> None:
    cause = diagnose("trainer", "exit code 1", [*TRACEBACK, "KeyError: 'reward'", "[rank0] shutting down"])
    assert str(cause) == "trainer ended: exit code 1: KeyError: 'reward'"
    assert not cause.is_config_fault


def test_a_death_without_a_word_is_still_a_cause() -> None:
    assert str(diagnose("inference", "killed by SIGKILL", [])) == "inference ended: killed by SIGKILL"
