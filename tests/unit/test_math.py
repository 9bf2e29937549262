"""MATH on problems of our own: the sets, what is refused, and answers in every shape, hostile ones included."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from nightshift_math import data, scoring

from nightshift.config.rules import Rules
from nightshift.config.rules_toml import Chosen, Table, rules_of
from nightshift.config.train_toml import load
from nightshift.engines.prime_rl.engine import PrimeRlEngine
from nightshift.errors import UsageError
from nightshift.evaluation import environment as environments
from tests.conftest import living_children
from tests.datasets import math_problems, small_math
from tests.rules import GSM8K_PRIME_RL, ROOT

# A completion that ends in an answer, and the right answer.
ANSWERS = json.loads((Path(__file__).parents[1] / "fixtures" / "scoring" / "math.json").read_text())
HOSTILE = {
    "fractions 10,000 deep": "\\boxed{" + "\\frac{" * 10_000 + "1" + "}{2}" * 10_000 + "}",
    "a megabyte of braces": "\\boxed" + "{" * 1_000_000,
    "a tower": "\\boxed{9^{9^{9}}}",
    "code": "\\boxed{__import__('os').system('touch /tmp/owned')}",
}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes more CPU time for the same work."""
    monkeypatch.setattr(scoring, "CPU_SECONDS", 60.0)


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    """A tree of 60 problems, taken for the whole of MATH."""
    with small_math(tmp_path) as copy:
        yield copy


def math(engine: str = "prime-rl", **table: Any) -> Rules:
    chosen = Chosen(environments=["math"], environment={"math": Table(**table)})
    return rules_of(ROOT, chosen, engine, 2)


def test_the_sets_are_stratified_and_without_what_is_public(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = copy / "public.txt"
    monkeypatch.setattr(data, "MATH_500", public)
    public.write_text("")
    notes: list[str] = []
    data.prepare(copy, notes.append)
    sets = {split: data.load(split) for split in get_args(data.Split)}
    assert {split: len(examples) for split, examples in sets.items()} == {"train": 15, "validation": 9, "test": 9}
    assert {example.split for example in sets["test"]} == {"test"}
    for split in ("validation", "test"):
        assert Counter(example.level for example in sets[split]) == {1: 3, 2: 3, 3: 3}
        assert {example.level for example in sets[split][:3]} == {1, 2, 3}
    assert data.load("train", seed=1) != sets["train"]
    assert {example.key for example in data.load("train", seed=1)} == {example.key for example in sets["train"]}
    keys = {example.key for example in sets["test"][:3]}
    public.write_text("\n".join(keys))
    assert not keys & {example.key for example in data.load("test")}
    data.prepare(copy, notes.append)
    assert " is ready, sha256 " in notes[1]
    example = sets["train"][0]
    assert example.answer.startswith("\\frac{")
    assert data.slices(example) == {"level": str(example.level), "subject": example.subject}
    assert data.messages(example)[0]["content"].endswith(data.INSTRUCTION)


def test_a_text_of_the_test_split_is_not_trained_on_and_a_long_problem_is_left_out(copy: Path) -> None:
    (row,) = math_problems("test", 1)
    changed = {"problem": row["problem"].upper().replace(" ", "\n ")}
    (copy / "train" / "algebra" / "0.json").write_text(json.dumps(row | changed))
    (copy / "train" / "algebra" / "2.json").write_text(json.dumps(row | {"problem": "é" * 951}))
    data.prepare(copy)
    problems = [one.problem for split in get_args(data.Split) for one in data.load(split, levels=[1, 2, 3, 4, 5])]
    assert changed["problem"] not in problems
    assert "é" * 951 not in problems
    assert data.PROMPT_TOKENS - data.MAX_PROBLEM_BYTES - len(data.INSTRUCTION) > 64  # for the chat template


@pytest.mark.parametrize("subject", ["type", "subject"])
def test_lines_of_the_hubs_copies_are_the_same_problems(copy: Path, tmp_path: Path, subject: str) -> None:
    data.prepare(copy)
    before = data.load("validation")
    for split, number in data.NUM_OFFICIAL.items():
        found = [{subject if k == "type" else k: v for k, v in row.items()} for row in math_problems(split, number)]
        lines = [json.dumps(row | ({"level": int(row["level"][-1])} if subject == "subject" else {})) for row in found]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    data.prepare(tmp_path)
    assert data.load("validation") == before


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (None, "train has 39 problems, MATH has 40"),
        ("{", "0.json:1 is not a problem of MATH: JSONDecodeError Expecting property name"),
        ('{"problem": "?"}', "0.json:1 is not a problem of MATH: KeyError 'level'"),
        ("\udcff", "0.json cannot be read: 'utf-8' codec can't decode byte 0xff"),
        ("[" * 100_000, "0.json:1 is not a problem of MATH: RecursionError"),
        ('{"problem": "?", "level": 1, "type": "x", "solution": "1"}', "MATH: ValueError the solution has no answer"),
    ],
)
def test_what_is_not_math_is_refused_in_one_line(copy: Path, text: str | None, cause: str) -> None:
    path = copy / "train" / "algebra" / "0.json"
    path.unlink()
    if text is not None:
        path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"Run: uv run prepare.py --math DIR") as raised:
        data.prepare(copy)
    assert cause in str(raised.value)
    assert "\n" not in str(raised.value)


def test_data_or_a_scorer_that_is_missing_or_another_and_levels_that_hold_too_little(copy, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"math.jsonl cannot be read: No such file.* --math DIR"):
        data.prepare()
    with monkeypatch.context() as patch:
        patch.setattr(data, "MATH_VERIFY", "0.8.0")
        with pytest.raises(ValueError, match=r"needs math-verify 0.8.0, not 0.9.0. Run: uv sync --extra math"):
            data.load("train")
    data.prepare(copy)
    with pytest.raises(ValueError, match=r"levels = \[1\] have 8 usable problems of train and 4 of test, not 18 and 9"):
        data.load("train", levels=[1])
    for levels in ([], [6], ["1"], [[1]], [1.0], 3):
        with pytest.raises(ValueError, match=r"is not a list of levels. Write some of \[1, 2, 3, 4, 5\]"):
            data.load("train", levels=levels)
    path = Path(os.environ[data.ENV_VAR]) / "math.jsonl"
    path.write_bytes(path.read_bytes().replace(b"loaves", b"LOAVES", 1))
    with pytest.raises(ValueError, match=r"was changed after prepare.py wrote it: another sha256"):
        data.load("train")


def test_what_math_verify_requires_is_part_of_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """sympy decides, too. Nothing is installed anew: one package says that it has another version."""
    before, gsm8k = math(), rules_of(ROOT, Chosen(environments=["gsm8k"]), "prime-rl", 2)
    assert before.environments[0].versions == (f"math-verify=={data.MATH_VERIFY}",)
    distribution = metadata.distribution

    def other(name: str) -> Any:
        return SimpleNamespace(version="0", requires=[]) if name == "sympy" else distribution(name)

    monkeypatch.setattr(metadata, "distribution", other)
    assert math().hash(ROOT) != before.hash(ROOT)
    assert rules_of(ROOT, Chosen(environments=["gsm8k"]), "prime-rl", 2) == gsm8k


@pytest.mark.parametrize(("text", "answer"), ANSWERS["equal"])
def test_answers_that_are_equal(text: str, answer: str) -> None:
    assert scoring.score(text, answer) == 1.0
    assert scoring.is_formatted(text) == ("\\boxed" in text)


@pytest.mark.parametrize(("text", "answer"), ANSWERS["not equal"])
def test_answers_that_are_not(text: str, answer: str) -> None:
    assert scoring.score(text, answer) == 0.0


@pytest.mark.slow
def test_hostile_answers_score_0_in_the_bounded_process_and_the_next_is_scored() -> None:
    """An answer that takes too long is counted and named; no answer ends the process."""
    (environment,) = environments.load(ROOT, math().environments)
    scorer = environment.scorer
    for name, text in HOSTILE.items():
        assert scorer.score(text, "x^2+\\sqrt{2}") == 0.0, name
        assert scorer.score("\\boxed{x+x}", "2x") == 1.0, name
    assert (0 < scorer.num_failed <= len(HOSTILE), scorer.num_scored) == (True, 2 * len(HOSTILE))
    assert "answers failed and counts 0; the first: TimeoutError: the comparison took more than" in scorer.failures()
    assert not Path("/tmp/owned").exists()
    scorer.close()
    assert living_children() == []


def test_its_limits_and_levels_reach_both_engines_rules_and_no_other_environment() -> None:
    for engine in ("prime-rl", "trl"):
        rules = math(engine)
        assert (rules.decoding.max_completion_tokens, rules.max_completion_tokens) == (2048, 2048)
    settings = PrimeRlEngine(math(), ROOT, {}).validate(load(ROOT / "train.toml")).settings
    assert settings["inference"]["vllm"]["max_model_len"] == data.PROMPT_TOKENS + 2048
    assert GSM8K_PRIME_RL.decoding.max_completion_tokens == 1024
    folders = {f"environments/{name}/" for name in ("math", "taskset", "gsm8k")}
    assert {"nightshift/evaluation/scorer.py", *folders} <= {*math().measuring}
    assert math().hash(ROOT) != math(args={"levels": [1, 2]}).hash(ROOT)


def test_args_that_an_environment_does_not_take_are_refused() -> None:
    with pytest.raises(UsageError, match=r'args has "level"\. Its arguments: levels'):
        math(args={"level": 1})
    chosen = Chosen(environments=["gsm8k"], environment={"gsm8k": Table(args={"levels": [1]})})
    with pytest.raises(UsageError, match=r'args has "levels"\. Its arguments: none'):
        rules_of(ROOT, chosen, "prime-rl", 2)
