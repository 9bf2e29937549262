"""Environments behind their protocol: found by folder, on Python's path by the harness, chosen by rules.toml."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nightshift.engines.downloads import data_problem
from nightshift.environments import Environment, chosen
from nightshift.errors import EngineError, UsageError
from nightshift.rules import ARITHMETIC_TRL, GSM8K_TRL, EnvironmentRules

ROOT = Path(__file__).parents[2]


def package(folder: Path, name: str) -> Path:
    """A package as an environment has it, in `folder`."""
    (folder / name).mkdir(parents=True)
    for module, text in {"__init__": "", "data": "PROMPT_TOKENS = 7", "scoring": ""}.items():
        (folder / name / f"{module}.py").write_text(text)
    return folder / name


def test_folders_come_last_on_the_path_and_a_package_from_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("one", "two"):
        package(tmp_path / "environments" / name, f"nightshift_{name}")
    one = Environment(tmp_path, EnvironmentRules("one", 1))
    assert (one.prompt_tokens, sys.path[-1]) == (7, str(tmp_path / "environments" / "one"))
    sys.path.insert(0, str(package(tmp_path / "elsewhere", "nightshift_two").parent))
    with pytest.raises(UsageError, match=f"Python imports nightshift_two from {tmp_path / 'elsewhere'}"):
        Environment(tmp_path, EnvironmentRules("two", 1))
    with pytest.raises(UsageError, match="nightshift_three is no package"):
        Environment(tmp_path, EnvironmentRules("three", 1))


def test_an_environment_asks_and_scores_the_answer() -> None:
    environment = Environment(ROOT, ARITHMETIC_TRL.environment)
    assert environment.package == "nightshift_arithmetic"
    assert [len(environment.examples(split)) for split in ("train", "selection")] == [4000, 1000]
    example = environment.examples("selection")[0]
    (message,) = environment.messages(example)
    assert message["role"] == "user"
    assert environment.score(example, "") == 0.0
    assert environment.score(example, f"#### {example.answer}") == 1.0


def test_missing_data_is_one_line_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTSHIFT_GSM8K", str(tmp_path))
    gsm8k, arithmetic = (Environment(ROOT, rules.environment) for rules in (GSM8K_TRL, ARITHMETIC_TRL))
    assert "uv run prepare.py --gsm8k" in str(data_problem(ROOT, GSM8K_TRL))
    for act in (lambda: gsm8k.examples("selection"), lambda: gsm8k.prepare(None, print)):
        with pytest.raises(EngineError, match="cannot be read: No such file"):
            act()
    assert data_problem(ROOT, ARITHMETIC_TRL) is None
    arithmetic.prepare(None, print)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('environments = ["gsm8k"]', "gsm8k"),
        ("", "None"),
        ("environments = [", "rules.toml: "),
        ("environment = []", "unknown field `environment`. Write environments = "),
        ('environments = "gsm8k"', "rules.toml: Expected `array`, got `str` - at `$.environments`."),
        ("environments = [1]", "rules.toml: Expected `str`, got `int` - at `$.environments[0]`."),
        ('environments = ["gms8k"]', "rules.toml: environments/ has no 'gms8k'. Write one of: arithmetic, gsm8k."),
        ('environments = ["../x"]', "Write one of: arithmetic, gsm8k."),
        (
            'environments = ["gsm8k", "arithmetic"]',
            "rules.toml: Expected `array` of length <= 1 - at `$.environments`.",
        ),
        (None, "rules.toml: [Errno 2] No such file"),
    ],
)
def test_rules_toml_is_read_strictly(tmp_path: Path, text: str | None, expected: str) -> None:
    (tmp_path / "environments").symlink_to(ROOT / "environments")
    if text is not None:
        (tmp_path / "rules.toml").write_text(text)
    try:
        said = str(chosen(tmp_path))
    except UsageError as error:
        said = str(error)
    assert expected in said
    assert "\n" not in said
