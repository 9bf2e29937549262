"""Environments behind their protocol: found by folder, on Python's path by the harness, chosen by rules.toml."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nightshift import environments
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
    (one,) = environments.load(tmp_path, [EnvironmentRules("one", 1)])
    assert (one.prompt_tokens, sys.path[-1]) == (7, str(tmp_path / "environments" / "one"))
    sys.path.insert(0, str(package(tmp_path / "elsewhere", "nightshift_two").parent))
    with pytest.raises(UsageError, match=f"Python imports nightshift_two from {tmp_path / 'elsewhere'}"):
        environments.load(tmp_path, [EnvironmentRules("two", 1)])
    with pytest.raises(UsageError, match="nightshift_three is no package"):
        environments.load(tmp_path, [EnvironmentRules("three", 1)])


def test_an_episode_asks_once_and_scores_the_answer() -> None:
    (environment,) = environments.load(ROOT, ARITHMETIC_TRL.environments)
    assert (environment.name, environment.package) == ("arithmetic", "nightshift_arithmetic")
    assert [len(environment.examples(split)) for split in ("train", "selection")] == [4000, 1000]
    example = environment.examples("selection")[0]
    episode = environment.episode(example)
    assert episode.score() == 0.0
    (message,) = episode.ask() or ()
    assert message["role"] == "user"
    episode.answer(f"#### {example.answer}")
    assert (episode.ask(), episode.score()) == (None, 1.0)
    assert environment.episode(example).ask() == [message]  # a fresh one


def test_missing_data_is_one_line_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTSHIFT_GSM8K", str(tmp_path))
    gsm8k, arithmetic = environments.load(ROOT, [*GSM8K_TRL.environments, *ARITHMETIC_TRL.environments])
    assert "uv run prepare.py --gsm8k" in str(environments.data_problem(gsm8k))
    for act in (lambda: gsm8k.examples("selection"), lambda: gsm8k.prepare(None, print)):
        with pytest.raises(EngineError, match="cannot be read: No such file"):
            act()
    assert environments.data_problem(arithmetic) is None
    arithmetic.prepare(None, print)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('environments = ["gsm8k"]', "('gsm8k',)"),
        ("", "()"),
        ("environments = [", "rules.toml: "),
        ("environment = []", "unknown field `environment`. Write environments = "),
        ('environments = "gsm8k"', "rules.toml: Expected `array`, got `str` - at `$.environments`."),
        ("environments = [1]", "rules.toml: Expected `str`, got `int` - at `$.environments[0]`."),
        ('environments = ["gms8k"]', 'rules.toml: environments/ has no "gms8k". Did you mean "gsm8k"?'),
        ('environments = ["../x"]', "Write one of: arithmetic, gsm8k."),
        ('environments = ["gsm8k", "arithmetic"]', "one is scored at a time. Name one."),
        (None, "rules.toml: [Errno 2] No such file"),
    ],
)
def test_rules_toml_is_read_strictly(tmp_path: Path, text: str | None, expected: str) -> None:
    (tmp_path / "environments").symlink_to(ROOT / "environments")
    if text is not None:
        (tmp_path / "rules.toml").write_text(text)
    try:
        said = str(environments.chosen(tmp_path))
    except UsageError as error:
        said = str(error)
    assert expected in said
    assert "\n" not in said
