"""Environments behind their protocol: found by folder, on Python's path by the harness, chosen by rules.toml."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nightshift.config.rules import EnvironmentRules
from nightshift.errors import EngineError, Interrupted, UsageError
from nightshift.evaluation import environment as environments
from nightshift.evaluation.evaluate import examples_digest
from nightshift.executors.process import interruptible
from tests.rules import GSM8K_TRL

ROOT = Path(__file__).parents[2]


def package(folder: Path, name: str) -> Path:
    """A package as an environment has it, in `folder`."""
    (folder / name).mkdir(parents=True)
    for module, text in {"__init__": "", "data": "PROMPT_TOKENS = 7", "scoring": ""}.items():
        (folder / name / f"{module}.py").write_text(text)
    return folder / name


def test_folders_come_last_on_the_path_and_a_package_from_elsewhere_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("one", "two"):
        package(tmp_path / "environments" / name, f"nightshift_{name}")
    (one,) = environments.load(tmp_path, [EnvironmentRules("one", 1)])
    assert (one.prompt_tokens, sys.path[-1]) == (7, str(tmp_path / "environments" / "one"))
    sys.path.insert(0, str(package(tmp_path / "elsewhere", "nightshift_two").parent))
    with pytest.raises(UsageError, match=f"Python imports nightshift_two from {tmp_path / 'elsewhere'}"):
        environments.load(tmp_path, [EnvironmentRules("two", 1)])
    with pytest.raises(UsageError, match="nightshift_three is no package"):
        environments.load(tmp_path, [EnvironmentRules("three", 1)])


def test_a_signal_in_the_code_of_a_package_is_no_fault_of_the_package(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    data = package(tmp_path / "environments" / "signalled", "nightshift_signalled") / "data.py"
    data.write_text("import os, signal\ndef load(split, size):\n    os.kill(os.getpid(), signal.SIGTERM)\n")
    (environment,) = environments.load(tmp_path, [EnvironmentRules("signalled", 1)])
    with pytest.raises(Interrupted), interruptible():
        environment.examples("train")


@pytest.mark.parametrize("keys", [(), ("a", "b"), ("a", "b", "b"), ("a", "b", "c", "d")])
def test_a_set_that_is_not_as_large_as_declared_or_has_a_key_twice_is_refused(keys, monkeypatch):
    (arithmetic,) = environments.load(ROOT, [EnvironmentRules("arithmetic", 3, needs=("gsm8k",))])
    data = SimpleNamespace(load=lambda split, size: [SimpleNamespace(key=key) for key in keys])
    monkeypatch.setattr(arithmetic, "module", lambda name: data)
    with pytest.raises(EngineError, match=rf"arithmetic: {len(keys)} examples of validation with .* 3 are asked for"):
        arithmetic.examples("validation")


def test_what_is_right_is_in_the_hash_of_the_examples_and_who_scores_them_in_that_of_the_rules() -> None:
    environment = SimpleNamespace(package="nightshift_math")
    digests = {examples_digest([(environment, SimpleNamespace(key="x", answer=right))]) for right in ("1", "2")}
    assert len(digests) == 2
    assert "nightshift/evaluation/environment.py" in GSM8K_TRL.measuring
