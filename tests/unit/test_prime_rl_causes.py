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
from nightshift.engines.prime_rl.diagnose import diagnose, is_fatal
from nightshift.engines.prime_rl.validator import Refusal, Verdict, explain
from nightshift.errors import Failure
from nightshift.text import clean
from tests.prime_rl_plans import SHIPPED, launch_of
from tests.stand_in_prime_rl import API, CORE, CORE_FAILED, ENGINE_DEAD, TORCHRUN, TRACEBACK

LOGS = Path(__file__).parents[1] / "fixtures" / "prime_rl" / "logs"
CONFIG, INFRASTRUCTURE, UNKNOWN = Failure.CONFIG, Failure.INFRASTRUCTURE, Failure.UNKNOWN
FAULTS = {True: CONFIG, False: INFRASTRUCTURE, None: UNKNOWN}  # of "is config fault" in the fixture
FIXES = {CONFIG: "uv run run.py --keys", UNKNOWN: "Undo"}

TORCHRUN_1 = TORCHRUN.format(code=1, why="To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html")


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
ENDS.append(
    {"program": "inference", "wrapped by": "core", "log": "AssertionError: block size",
     "last words": 512 * f"{ENGINE_DEAD}\n", "cause": "AssertionError: block size", "fix": "",
     "is config fault": None},
)  # fmt: skip


def end_of(name: str, log: str, ending: str = "exit code 1", is_shared: bool = False):
    lines = [line for line in (clean(line, 1000) for line in log.split("\n")) if line]
    return diagnose(name, ending, lines, is_shared=is_shared)


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
    for wrapper in ("ChildFailedError", "EngineDeadError", "initialization failed", "not reached", "and so on"):
        assert wrapper not in cause.cause


@pytest.mark.parametrize(
    ("name", "log", "ending"),
    [
        ("orchestrator", "17:41:57    INFO Step 3 | 2.0s | Reward 0.5", "killed by SIGKILL"),
        ("inference", f"{API}{ENGINE_DEAD}", "exit code 1"),
        ("trainer", (LOGS / "kill9-trainer.txt").read_text(), "exit code 1"),
    ],
)
def test_what_was_killed_is_not_explained_by_its_last_line(name: str, log: str, ending: str) -> None:
    """Met: a killed orchestrator was explained by its last INFO line, an engine core by vLLM's EngineDeadError."""
    cause = end_of(name, log, ending)
    assert str(cause).startswith(f"{name} ended: {ending}: a process was killed. Check the kernel log")
    assert cause.failure is INFRASTRUCTURE


def test_what_prime_rl_logs_and_survives_is_not_fatal() -> None:
    problem = "ERROR Fatal error in a tool of the environment"
    assert is_fatal([f"17:45:36   {problem.replace('a tool', 'train')}"])
    assert not is_fatal([f"17:45:36 WARNING Trace failed in group 3 (arithmetic) - RuntimeError: {problem}"])


def test_our_own_server_on_the_same_card_is_no_other_process() -> None:
    """torch's line names the server, which also belongs to the run."""
    used = "Process 4711 has 7.00 GiB memory in use. Including non-PyTorch memory, this process has 77.90 GiB memory"
    log = worker(f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. {used} in use.")
    for is_shared, failure in ((True, CONFIG), (False, INFRASTRUCTURE)):
        assert end_of("trainer", log, is_shared=is_shared).failure is failure


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
    refusals = msgspec.json.decode(launch.verdict.read_bytes(), type=Verdict).errors
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
