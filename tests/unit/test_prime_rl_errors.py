"""prime-rl's refusals in terms of train.toml: what its real classes said is in fixtures/prime_rl/refusals.json."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from nightshift.config.train_toml import parse
from nightshift.engines.prime_rl.session import Refusal, explain, read_verdict
from tests.prime_rl_plans import SHIPPED, launch_of

FIXTURE = Path(__file__).parents[1] / "fixtures" / "prime_rl" / "refusals.json"
RECORDED = {
    name: msgspec.convert(case["errors"], tuple[Refusal, ...]) for name, case in json.loads(FIXTURE.read_text()).items()
}
CONFIG = parse(SHIPPED)
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
    error = explain(errors, CONFIG)
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
    assert explain(RECORDED[name], CONFIG).cause.startswith(f"train.toml:{number}: ")


def test_copies_of_a_shared_key_are_one_error_and_others_are_counted() -> None:
    shared = RECORDED["text for a shared number"]
    assert len(shared) == 3
    assert "more)" not in explain(shared, CONFIG).fix
    both = [*RECORDED["too few GPUs"], *shared]
    assert explain(both, CONFIG).cause.startswith("max_steps: ")  # what the agent can change comes first
    assert "(and 1 more)" in explain(both, CONFIG).fix


def test_an_environment_without_prime_rl_is_an_answer_and_not_train_toml_s_fault(tmp_path: Path) -> None:
    launch = launch_of(CONFIG, tmp_path)
    launch.write()
    [command] = [command for command in launch.commands if command.name == "validator"]
    result = subprocess.run([sys.executable, *command.argv[1:]], capture_output=True, text=True)
    assert result.returncode == 1
    assert json.loads(launch.verdict.read_bytes()) == json.loads(result.stdout)
    errors = read_verdict(launch.verdict)
    assert [error.type for error in errors] == ["ModuleNotFoundError"]
    assert "No module named 'prime_rl'. This is not train.toml's fault" in str(explain(errors, CONFIG))
