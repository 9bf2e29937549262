"""The end of a dead process's log, or what prime-rl's own check refused, becomes one line with its fix."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nightshift.campaign.records import Outcome, Training
from nightshift.config.train_toml import parse
from nightshift.engines.prime_rl.diagnose import diagnose
from nightshift.engines.prime_rl.validator import Refusal, explain, read_refusals
from nightshift.errors import Failure
from nightshift.text import clean
from tests.prime_rl_plans import SHIPPED, launch_of
from tests.stand_in_prime_rl import API, CORE, CORE_FAILED, ENGINE_DEAD, TORCHRUN, TRACEBACK

LOGS = Path(__file__).parents[1] / "fixtures" / "prime_rl" / "logs"
CONFIG, INFRASTRUCTURE, UNKNOWN = Failure.CONFIG, Failure.INFRASTRUCTURE, Failure.UNKNOWN
FAULTS = {True: CONFIG, False: INFRASTRUCTURE, None: UNKNOWN}  # of "is config fault" in the fixture
FIXES = {CONFIG: "uv run run.py --keys", UNKNOWN: "Undo"}

TORCHRUN_1 = TORCHRUN.format(code=1, why="To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html")
# torch's whole line; c10/cuda/CUDACachingAllocator.cpp names the processes on the GPU.
OUT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of"
)
OURS = "Including non-PyTorch memory, this process has 77.90 GiB memory in use."


def worker(exception: str) -> str:
    """What torchrun's worker says of its end, and torchrun after it."""
    text = f"17:45:37   ERROR Fatal error in train\n{TRACEBACK}{exception}"
    return "\n".join(f"[trainer0]:{line}" for line in text.splitlines()) + f"\n{TORCHRUN_1}"


def core(exception: str, wrapper: str = CORE_FAILED) -> str:
    """What vLLM's engine says of its end, and its API server after it."""
    said = "\n".join(CORE + line for line in f"{TRACEBACK}{exception}".splitlines())
    return said + "\n" + "\n".join(API + line for line in wrapper.splitlines())


# Whose log, how it ends and what wraps that, words of the cause and of its fix, whose fault, and sometimes why.
ENDS: list[dict[str, Any]] = json.loads((LOGS.parents[1] / "log-ends.json").read_text())
ENDS += [
    {"program": "trainer", "log": (LOGS / "kill9-trainer.txt").read_text(), "cause": "a process was killed",
     "fix": "dmesg", "is config fault": False},
    {"program": "inference", "wrapped by": "core", "log": "AssertionError: block size",
     "last words": 512 * f"{ENGINE_DEAD}\n", "cause": "AssertionError: block size", "fix": "",
     "is config fault": None},
]  # fmt: skip


def end_of(name: str, log: str, ending: str = "exit code 1"):
    return diagnose(name, ending, [line for line in map(clean_line, log.split("\n")) if line])


def clean_line(line: str) -> str:
    return clean(line, 1000)


@pytest.mark.parametrize("end", ENDS)
def test_whose_fault_an_end_is_and_in_which_words(end):
    name, fix, wrap = end["program"], end["fix"], {"worker": worker, "core": core}.get(end.get("wrapped by"), str)
    log = wrap(end["log"], end["last words"]) if "last words" in end else wrap(end["log"])
    cause = end_of(name, f"17:45:00    INFO Starting\n{log}")
    assert cause.cause.startswith((f"{name}: ", f"{name} ended: "))
    assert end["cause"] in cause.cause
    assert fix in cause.fix
    assert bool(fix) == bool(cause.fix)
    assert cause.failure is FAULTS[end["is config fault"]]
    for wrapper in ("ChildFailedError", "EngineDeadError", "initialization failed", "not reached"):
        assert wrapper not in cause.cause


@pytest.mark.parametrize(
    "log",
    [
        "17:41:57    INFO Step 3 | 2.0s | Reward 0.5",
        "[W1129 07:54:40.184 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
    ],
)
def test_a_killed_program_does_not_quote_its_last_news(log: str) -> None:
    """Met: a killed orchestrator was explained by its last INFO line. The other line is torch's without a network."""
    cause = end_of("orchestrator", log, "killed by SIGKILL")
    assert str(cause).startswith("orchestrator ended: killed by SIGKILL: a process was killed. Check the kernel log")
    assert cause.failure is INFRASTRUCTURE


def test_an_engine_that_is_gone_is_not_quoted_as_the_cause_of_its_death() -> None:
    """Met: a killed engine core was explained by vLLM's EngineDeadError, and a full disk by a warning's code."""
    cause = end_of("inference", f"{API}{ENGINE_DEAD}")
    assert str(cause).startswith("inference ended: exit code 1: a process was killed. Check the kernel log")
    assert cause.failure is INFRASTRUCTURE
    cause = end_of("inference", "warnings.warn('resource_tracker: There appear to be %d '")
    assert str(cause) == "inference ended: exit code 1; its log does not say why"


SCHEDULER = """pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig
  Value error, max_num_batched_tokens (2048) must be greater than or equal to max_num_seqs (8192). [type=value_error]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error
and so on"""


@pytest.mark.parametrize(
    ("name", "log", "words"),
    [
        ("inference", core(SCHEDULER), "for SchedulerConfig Value error, max_num_batched_tokens (2048) must be"),
        ("trainer", worker("KeyError: 'a'\nfirst\nsecond\nthird"), "exit code 1: KeyError: 'a' first second"),
    ],
)
def test_an_exception_is_quoted_with_two_lines_of_its_message(name: str, log: str, words: str) -> None:
    cause = end_of(name, log).cause
    assert words in cause
    assert cause.endswith(words) or name == "inference"
    assert "and so on" not in cause


def test_our_own_server_on_the_same_card_is_no_other_process() -> None:
    """torch's line names the server, which also belongs to the run."""
    text = worker(f"{OUT} which 1.20 GiB is free. Process 4711 has 7.00 GiB memory in use. {OURS}")
    lines = [line for line in map(clean_line, text.split("\n")) if line]
    assert [diagnose("trainer", "exit code 1", lines, is_shared=it).failure for it in (True, False)] == [
        CONFIG,
        INFRASTRUCTURE,
    ]


FIXTURE = Path(__file__).parents[1] / "fixtures" / "prime_rl" / "refusals.json"
RECORDED = {
    name: msgspec.convert(case["errors"], tuple[Refusal, ...]) for name, case in json.loads(FIXTURE.read_text()).items()
}
SOURCE = SHIPPED.decode()
# What is left of the recorded errors, and whose fault each is.
SAID = {
    "unknown key": ("trainer.optim.adamw.lrr = 1.0: prime-rl refuses it: Extra inputs are not permitted", UNKNOWN),
    "text for a number": ('trainer.optim.lr = "abc": prime-rl refuses it: Input should be a valid number', CONFIG),
    "out of range": ("orchestrator.train.sampling.temperature = 3.0: prime-rl refuses it: Input should be", CONFIG),
    "unknown variant": ("trainer.loss: prime-rl refuses it: Input tag 'ppo'", CONFIG),
    "two settings for one": ("train.toml: prime-rl refuses it: Shared config conflicts", UNKNOWN),
    "the test split": ('orchestrator.train.source.0.env.taskset.split = "test": prime-rl refuses it: Input', UNKNOWN),
    "a taskset that is not installed": ("train.toml: prime-rl refuses it: taskset 'nowhere' not found", UNKNOWN),
}


# Of the line that is named: the key's, or its table's.
FIRST_WORDS = {"text for a number": "lr = 3e-6", "unknown key": "[trainer.optim]", "unknown variant": "[trainer.loss]"}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_refusal_is_one_line_with_key_and_fix(name: str) -> None:
    said, failure = SAID[name]
    error = explain(RECORDED[name], SOURCE)
    message = str(error)
    assert said in message
    if name in FIRST_WORDS:
        number = next(number for number, text in enumerate(SOURCE.split("\n"), 1) if text.startswith(FIRST_WORDS[name]))
        assert message.startswith(f"train.toml:{number}: ")
    assert error.failure is failure
    assert FIXES[failure] in message
    assert len(message) < 600
    assert message.endswith(".")


def test_what_the_agent_can_change_comes_first_and_the_others_are_counted() -> None:
    all_of_them = [*RECORDED["a taskset that is not installed"], *RECORDED["the test split"], *RECORDED["out of range"]]
    error = explain(all_of_them, SOURCE)
    assert "orchestrator.train.sampling.temperature" in error.cause
    assert "(and 2 more)" in error.fix
    assert error.failure is CONFIG
    assert explain(all_of_them[:2], SOURCE).failure is UNKNOWN


def test_an_environment_without_prime_rl_is_a_refusal_of_no_key(tmp_path: Path) -> None:
    launch = launch_of(parse(SHIPPED), tmp_path)
    launch.write()
    [command] = [command for command in launch.commands if command.name == "validator"]
    assert subprocess.run([sys.executable, *command.argv[1:]]).returncode == 1
    refusals = read_refusals(launch.verdict)
    error = explain(refusals, SOURCE)
    assert (error.failure, "No module named 'prime_rl'. Undo" in str(error)) == (UNKNOWN, True)
    assert list((tmp_path / "configs").iterdir()) == []


@pytest.mark.parametrize(
    ("log", "is_name"), [("env-server-gsm8k.log", True), ("../trainer.log", False), ("a\x00.log", False)]
)
def test_a_result_names_a_log_in_the_run_s_folder_only(log: str, is_name: bool) -> None:
    data = msgspec.json.encode(Training(Outcome.CRASHED, 0, log=log))
    with nullcontext() if is_name else pytest.raises(msgspec.ValidationError):
        assert msgspec.json.decode(data, type=Training).log == log
