"""The end of a dead process's log becomes one line: what happened, where, what to try."""

from __future__ import annotations

import pytest

from nightshift.engines.prime_rl.causes import diagnose

TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 1, in <module>']


@pytest.mark.parametrize(
    ("name", "line", "text", "fix", "is_config_fault"),
    [
        (
            "trainer",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            "out of GPU",
            "seq_len",
            True,
        ),
        ("inference", "torch.OutOfMemoryError: CUDA out of memory.", "out of GPU", "max_num_seqs", True),
        (
            "inference",
            "ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory "
            "utilization (0.9, 71.2 GiB).",
            "less free memory",
            "gpu_memory_utilization",
            False,
        ),
        ("inference", "ValueError: No available memory for the cache blocks.", "KV cache", "Raise", True),
        (
            "orchestrator",
            "RuntimeError: 10 consecutive empty train batches — check algorithm credit and task difficulty.",
            "all rewards of every group were equal",
            "group_size",
            True,
        ),
        (
            "orchestrator",
            "RuntimeError: 10 consecutive zero-output batch equivalents — check the curriculum admission policy",
            "nothing to train on",
            "curriculum",
            True,
        ),
        (
            "env-server",
            "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5000')",
            "port",
            "again",
            False,
        ),
        ("trainer", "OSError: [Errno 28] No space left on device", "disk is full", "Free space", False),
        (
            "trainer",
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94",
            "NCCL",
            "doctor",
            False,
        ),
        ("trainer", "RuntimeError: No CUDA GPUs are available", "driver failed", "nvidia-smi", False),
        ("trainer", "  traceback : Signal 9 (SIGKILL) received by PID 32703", "SIGKILL", "dmesg", False),
        (
            "trainer",
            "ValueError: Flash attention 3 is only supported if the flash_attn_3 package is installed. Install with",
            "attention kernel",
            "prepare.py",
            False,
        ),
        ("orchestrator", "3 validation errors for OrchestratorConfig", "refuses the config", "Undo", True),
    ],
)
def test_known_ends_are_named(name: str, line: str, text: str, fix: str, is_config_fault: bool) -> None:
    cause = diagnose(name, "exit code 1", [*TRACEBACK, line, "torchrun: later noise"])
    assert cause.cause.startswith(f"{name}: ")
    assert text in cause.cause
    assert fix in cause.fix
    assert cause.is_config_fault is is_config_fault
    assert "\n" not in str(cause)


def test_an_unknown_end_quotes_how_it_ended_and_its_last_error() -> None:
    cause = diagnose("trainer", "exit code 1", [*TRACEBACK, "KeyError: 'reward'", "[rank0] shutting down"])
    assert str(cause) == "trainer ended: exit code 1: KeyError: 'reward'"
    assert not cause.is_config_fault


def test_a_death_without_a_word_is_still_a_cause() -> None:
    assert str(diagnose("inference", "killed by SIGKILL", [])) == "inference ended: killed by SIGKILL"
