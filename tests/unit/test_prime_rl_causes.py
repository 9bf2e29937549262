"""The end of a dead process's log, or what prime-rl's own check refused, becomes one line with its fix."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from nightshift.config.train_toml import parse
from nightshift.engines.prime_rl.diagnose import PortTaken, diagnose
from nightshift.engines.prime_rl.session import Refusal, explain, read_verdict
from nightshift.text import clean
from tests.prime_rl_plans import SHIPPED, launch_of
from tests.stand_in_prime_rl import API, CORE, CORE_FAILED, ENGINE_DEAD, ENGINE_DIED, TORCHRUN, TRACEBACK

LOGS = Path(__file__).parents[1] / "fixtures" / "prime_rl" / "logs"
CONFIG, MACHINERY, INCUMBENT = True, False, None  # whose fault; None: the incumbent's start tells

UNREACHED = "17:57:55 WARNING Inference server was not reached after 10 seconds (Error: All connection attempts failed)"
TORCHRUN_1 = TORCHRUN.format(code=1, why="To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html")
# torch's whole line; c10/cuda/CUDACachingAllocator.cpp names the processes on the GPU.
OUT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of"
)
OURS = "which 1.20 GiB is free. Including non-PyTorch memory, this process has 77.90 GiB memory in use."
THEIRS = (
    "which 1.20 GiB is free. Process 4711 has 40.00 GiB memory in use. Including non-PyTorch memory, this process has"
)


def worker(exception: str) -> str:
    """What torchrun's worker says of its end, and torchrun after it."""
    text = f"17:45:37   ERROR Fatal error in train\n{TRACEBACK}{exception}"
    return "\n".join(f"[trainer0]:{line}" for line in text.splitlines()) + f"\n{TORCHRUN_1}"


def core(exception: str, wrapper: str = CORE_FAILED) -> str:
    """What vLLM's engine says of its end, and its API server after it."""
    said = "\n".join(CORE + line for line in f"{TRACEBACK}{exception}".splitlines())
    return said + "\n" + "\n".join(API + line for line in wrapper.splitlines())


# Whose log, how it ends, words of the cause, words of the fix, whose fault.
ENDS: list[tuple[str, str, str, str, bool | None]] = [
    ("trainer", worker(f"{OUT} {OURS}"), "out of GPU memory", "seq_len", CONFIG),
    ("inference", core(f"{OUT} {OURS}"), "out of GPU memory", "max_num_seqs", CONFIG),
    ("trainer", worker(f"{OUT} {THEIRS} 37.90 GiB memory in use."), "beside another process", "nvidia-smi", MACHINERY),
    ("trainer", worker(f"{OUT} {THEIRS.replace('40.00 GiB', '212.00 MiB')} 77.00 GiB memory in use."),  # a desktop
     "out of GPU memory", "seq_len", CONFIG),
    # In a container torch does not know itself by the number that the driver has for it.
    ("trainer", worker(f"{OUT} which 1 MiB is free. Process 20398 has 14.52 GiB memory in use."), "out of GPU memory",
     "seq_len", CONFIG),
    ("inference", core("ValueError: No available memory for the cache blocks."), "KV cache", "Raise", CONFIG),
    ("inference", core("ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU "
     "memory utilization (0.9, 71.2 GiB)."), "less free memory", "gpu_memory_utilization", INCUMBENT),
    ("orchestrator", "RuntimeError: 10 consecutive empty train batches — check algorithm credit and task difficulty.",
     "all rewards of every group were equal", "group_size", CONFIG),
    ("orchestrator", "RuntimeError: 10 consecutive zero-output batch equivalents — check the curriculum admission",
     "nothing to train on", "curriculum", CONFIG),
    ("orchestrator", "3 validation errors for OrchestratorConfig", "refuses the config", "Undo", CONFIG),
    ("env-server", "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5000')", "port", "again",
     MACHINERY),
    ("trainer", worker("torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
     "network address. port: 20004, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"),
     "port", "again", MACHINERY),
    ("trainer", worker("OSError: [Errno 28] No space left on device"), "disk is full", "Free space", MACHINERY),
    ("trainer", worker("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94"), "NCCL", "doctor",
     MACHINERY),
    ("trainer", worker("RuntimeError: No CUDA GPUs are available"), "driver failed", "nvidia-smi", MACHINERY),
    ("inference", core("RuntimeError: CUDA error: an illegal memory access was encountered", ENGINE_DEAD),
     "driver failed", "nvidia-smi", MACHINERY),
    ("trainer", (LOGS / "kill9-trainer.txt").read_text(), "SIGKILL", "dmesg", MACHINERY),
    ("trainer", worker("ValueError: Flash attention 3 is only supported if the flash_attn_3 package is installed."),
     "attention kernel", "prepare.py", MACHINERY),
    # No pattern fits: the exception above what only points back to it.
    ("trainer", worker("ZeroDivisionError: division by zero"), "exit code 1: ZeroDivisionError: division by zero",
     "", INCUMBENT),
    ("trainer", worker("AssertionError"), "ended: exit code 1: AssertionError", "", INCUMBENT),
    ("trainer", worker("torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\nLoweringException: "
     "AttributeError: 'NoneType' object has no attribute 'meta'"), "LoweringException: AttributeError", "", INCUMBENT),
    ("inference", core("KeyError: 'model.layers.0.qkv_proj.lora_A'"), "KeyError: 'model.layers.0", "", INCUMBENT),
    ("inference", core("AssertionError: block size", 512 * f"{ENGINE_DEAD}\n"), "AssertionError: block size", "",
     INCUMBENT),
    ("inference", core("RuntimeError: UVA is not available"), "UVA is not available", "", INCUMBENT),  # on WSL2
    ("validator", "ModuleNotFoundError: No module named 'prime_rl'", "No module named 'prime_rl'", "", INCUMBENT),
    ("orchestrator", f"{UNREACHED}\n{TRACEBACK}ValueError: Model x was not found in the inference pool",
     "exit code 1: ValueError: Model x was not found", "", INCUMBENT),
    # Nobody said why; what is no error quotes the config, in which an agent names pools and gates.
    ("orchestrator", "17:41:57    INFO Curriculum (pools={'EADDRINUSE': 1, 'OutOfMemoryError': 2, 'Xid': 3})",
     "ended: exit code 1: ", "", MACHINERY),
    ("inference", f"{API}{ENGINE_DIED}\n{API}{ENGINE_DEAD}\nINFO:  Application shutdown complete.",
     "Engine core proc EngineCore died unexpectedly", "", MACHINERY),
    ("orchestrator", f"{UNREACHED}\n17:58:15 WARNING Address already in use, trying another", "ended: exit code 1", "",
     MACHINERY),
    ("trainer", "[trainer0]:W1120 17:45:36.354000 30930 torch/utils/x.py:140] RuntimeError: No CUDA GPUs are available",
     "ended: exit code 1", "", MACHINERY),
    ("inference", "", "ended: exit code 1", "", MACHINERY),
    # What an agent names, and what its policy says, in exceptions of another kind.
    ("orchestrator", f"{TRACEBACK}KeyError: 'EADDRINUSE'", "KeyError: 'EADDRINUSE'", "", INCUMBENT),
    ("orchestrator", f"{TRACEBACK}KeyError: 'Xid'", "KeyError: 'Xid'", "", INCUMBENT),
    ("orchestrator", f"{TRACEBACK}KeyError: 'DistBackendError'", "KeyError: 'DistBackendError'", "", INCUMBENT),
    ("orchestrator", f"{TRACEBACK}ValueError: pool Address-already-in-use has no weight", "ValueError: pool", "",
     INCUMBENT),
    ("env-server", f"{TRACEBACK}ValueError: could not convert string to float: 'OSError: [Errno 98] Address already in "
     "use'", "could not convert", "", INCUMBENT),
    ("env-server", f"{TRACEBACK}ValueError: zmq.error.ZMQError: Address already in use", "ValueError: zmq", "",
     INCUMBENT),
]  # fmt: skip


def end_of(name: str, log: str):
    return diagnose(name, "exit code 1", [line for line in map(clean_line, log.split("\n")) if line])


def clean_line(line: str) -> str:
    return clean(line, 1000)


@pytest.mark.parametrize(("name", "log", "words", "fix", "fault"), ENDS)
def test_whose_fault_an_end_is_and_in_which_words(name, log, words, fix, fault):
    cause = end_of(name, f"17:45:00    INFO Starting\n{log}")
    assert cause.cause.startswith((f"{name}: ", f"{name} ended: "))
    assert words in cause.cause
    assert fix in cause.fix
    assert bool(fix) == bool(cause.fix)
    assert cause.is_config_fault is fault
    for wrapper in ("ChildFailedError", "EngineDeadError", "initialization failed", "not reached"):
        assert wrapper not in cause.cause


def test_an_exception_long_before_the_end_did_not_cause_it() -> None:
    log = f"{TRACEBACK}ImportError: flash_infer is not there\n" + 150 * "INFO step\n" + f"{API}{ENGINE_DIED}"
    assert "died unexpectedly" in end_of("inference", log).cause
    assert end_of("inference", log).is_config_fault is MACHINERY


@pytest.mark.parametrize(
    ("name", "line"),
    [
        # pyzmq, torch's TCPStore below torchrun, Python's socket with and without its address, uvicorn.
        ("orchestrator", "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:20002')"),
        ("env-server", "17:45:37   ERROR zmq.error.ZMQError: Address already in use"),
        ("trainer", "[rank0]: torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
         "network address. port: 20004, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"),
        ("inference", f"{API}OSError: [Errno 98] Address already in use"),
        ("inference", "OSError: [Errno 98] Address already in use (while attempting to bind on address ('', 20000))"),
        ("inference", "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 20000): address "
         "already in use"),
    ],
)  # fmt: skip
def test_a_port_that_was_taken_is_told_from_all_else(name: str, line: str) -> None:
    assert isinstance(end_of(name, f"{TRACEBACK}{line}"), PortTaken)


OTHER = "Process 4711 has 7.00 GiB memory in use. "


@pytest.mark.parametrize(
    ("memory", "others", "words", "fault"),
    [
        ("2 x 24 GB", 0, "ac on, or try the preset below 2 x 24 GB: memory_gb = 16 in rules.toml", CONFIG),
        ("2 x 24 GB", 1, "nvidia-smi", MACHINERY),
        ("1 x 48 GB", 1, "memory_gb = 24 in rules.toml", CONFIG),  # our own server is on the same card
        ("1 x 48 GB", 2, "nvidia-smi", MACHINERY),
        ("2 x 16 GB", 0, "trainer.model.ac on.", CONFIG),  # none is below
        ("none", 0, "trainer.model.ac on.", CONFIG),
    ],
)  # fmt: skip
def test_out_of_memory_names_the_preset_to_try_and_knows_its_own_processes(memory, others, words, fault):
    text = worker(f"{OUT} which 1.20 GiB is free. {others * OTHER}{OURS.partition('free. ')[2]}")
    cause = diagnose("trainer", "exit code 1", [line for line in map(clean_line, text.split("\n")) if line], memory)
    assert (cause.is_config_fault, words in str(cause)) == (fault, True), str(cause)


def test_a_death_without_a_word_is_still_a_cause() -> None:
    assert str(diagnose("inference", "killed by SIGKILL", [])) == "inference ended: killed by SIGKILL"


FIXTURE = Path(__file__).parents[1] / "fixtures" / "prime_rl" / "refusals.json"
RECORDED = {
    name: msgspec.convert(case["errors"], tuple[Refusal, ...]) for name, case in json.loads(FIXTURE.read_text()).items()
}
SHIPPED_CONFIG = parse(SHIPPED)
LINES = SHIPPED.decode().split("\n")
# What is left of the recorded errors: the key as train.toml names it, and whether train.toml can be to blame.
SAID = {
    "unknown key": ("trainer.optim.lrr: prime-rl refuses it: Extra inputs are not permitted", True),
    "text for a number": ("trainer.optim.lr = 3e-6: prime-rl refuses it: Input should be a valid number", True),
    "text for a shared number": ("max_steps: prime-rl refuses it: Input should be a valid integer", True),
    "out of range": ("orchestrator.train.sampling.temperature = 1.0: prime-rl refuses it: Input should be less", True),
    "groups that do not divide the batch": ("orchestrator: prime-rl refuses it: Batch size must be divisible", True),
    "more in flight than allowed": ("orchestrator.concurrency: prime-rl refuses it: concurrency.initial", True),
    "unknown variant": ("trainer.loss: prime-rl refuses it: Input tag 'ppo'", True),
    "decay without an end": ("trainer: prime-rl refuses it: Must specify max_steps when using a cosine", True),
    "unknown gate": ("orchestrator.train.source.curriculum.gates.default.type: prime-rl refuses it: Input sh", True),
    "two settings for one": ("train.toml: prime-rl refuses it: Shared config conflicts", True),
    "no renderer for the model": ("orchestrator: prime-rl refuses it: orchestrator.renderer.name='auto' but", True),
    "too few GPUs": ("deployment: prime-rl refuses it: Total GPU count (2 = 1 train + 1 infer) exceeds", False),
    "the sealed set": ("orchestrator.train.source.env.taskset.split: prime-rl refuses it: Input should be", False),
    "unknown key of the taskset": ("orchestrator.train.source.env.taskset.shuffle: prime-rl refuses it", False),
    "a taskset that is not installed": ("failed: ModuleNotFoundError: taskset 'nowhere' not found", False),
    "a module that is no taskset": ("failed: TypeError: taskset module 'json' exports no Taskset", False),
    "a server that was started otherwise": ("inference.vllm.max_num_seqs: the server was started with 64", False),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_refusal_is_one_line_with_key_and_fix(name: str) -> None:
    errors = RECORDED[name]
    said, is_ours = SAID[name]
    error = explain(errors, SHIPPED_CONFIG)
    message = str(error)
    assert said in message
    assert error.is_config_fault is is_ours
    assert ("uv run run.py --keys" in message, "uv run nightshift doctor" in message) == (is_ours, not is_ours)
    assert len(message) < 600
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("name", "line"),
    [("text for a number", "lr = 3e-6"), ("unknown variant", "[trainer.loss]"), ("out of range", "temperature = 1.0")],
)
def test_the_line_is_the_key_s_or_its_table_s(name: str, line: str) -> None:
    number = next(number for number, text in enumerate(LINES, 1) if text.startswith(line))
    assert explain(RECORDED[name], SHIPPED_CONFIG).cause.startswith(f"train.toml:{number}: ")


def test_copies_of_a_shared_key_are_one_error_and_others_are_counted() -> None:
    shared = RECORDED["text for a shared number"]
    assert len(shared) == 3
    assert "more)" not in explain(shared, SHIPPED_CONFIG).fix
    both = [*RECORDED["too few GPUs"], *shared]
    assert explain(both, SHIPPED_CONFIG).cause.startswith("max_steps: ")  # what the agent can change comes first
    assert "(and 1 more)" in explain(both, SHIPPED_CONFIG).fix


def test_an_environment_without_prime_rl_is_an_answer_and_not_train_toml_s_fault(tmp_path: Path) -> None:
    launch = launch_of(SHIPPED_CONFIG, tmp_path)
    launch.write()
    [command] = [command for command in launch.commands if command.name == "validator"]
    result = subprocess.run([sys.executable, *command.argv[1:]], capture_output=True, text=True)
    assert result.returncode == 1
    assert json.loads(launch.verdict.read_bytes()) == json.loads(result.stdout)
    errors = read_verdict(launch.verdict)
    assert [error.type for error in errors] == ["ModuleNotFoundError"]
    assert "No module named 'prime_rl'. This is not train.toml's fault" in str(explain(errors, SHIPPED_CONFIG))
