"""transfer, end to end on a real git checkout, with stand-ins for the pool and for the training process."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from nightshift import worker
from nightshift.campaign.verify import verify
from nightshift.certify import transfer as transfers
from nightshift.certify.certificate import Comparison
from nightshift.certify.pairs import MAX_SEEDS
from nightshift.certify.transfer import FIRST_SEED_INDEX, Transfer, describe, summary, targets, transfer, verdicts
from nightshift.engines.trl.engine import TrlEngine
from nightshift.errors import Interrupted, UsageError
from nightshift.experiment import run_experiment
from nightshift.report.page import render, view_of
from nightshift.request import Request
from nightshift.rules import Rules
from nightshift.setup import Setup
from tests.conftest import living_children
from tests.rules import ARITHMETIC_TRL
from tests.stand_in_setup import GOOD, TRAINER, SilentReporter, keep, make_poor, write
from tests.stand_ins import quick
from tests.waiting import HANG_SECONDS

RULES = quick(ARITHMETIC_TRL, 100)


@pytest.fixture
def setup(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    setup = make_poor(checkout, RULES, monkeypatch)

    def open_engine(rules: Rules, root: Path, environ: Any, *flags: object) -> TrlEngine:
        return TrlEngine(rules, root, environ, trainer=TRAINER)

    monkeypatch.setattr(worker, "open_engine", open_engine)
    monkeypatch.setattr(transfers, "open_engine", open_engine)
    really = transfers.rules_elsewhere
    monkeypatch.setattr(
        transfers, "rules_elsewhere", lambda *arguments: replace(really(*arguments), environments=RULES.environments,
        startup_seconds=HANG_SECONDS, evaluation_seconds=HANG_SECONDS, budget_seconds=1.0),
    )  # fmt: skip
    run_experiment(Request(), setup)
    return setup


@pytest.fixture
def kept(setup: Setup) -> Setup:
    return keep(setup)


def run_names(setup: Setup) -> list[str]:
    return sorted(path.parent.name for path in setup.ledger.runs_dir.glob("transfer/*/*/run.json"))


def test_the_same_environment_with_more_time_goes_on_and_is_asked_again_for_nothing(kept: Setup) -> None:
    def interrupt(text: str) -> None:
        if "run 3 of 4" in text:
            raise Interrupted("stopped by SIGINT")

    assert isinstance(kept.reporter, SilentReporter)
    kept.reporter.on_note = interrupt
    asked = targets(kept, [], 2.0, 2)
    with pytest.raises(Interrupted):
        transfer(asked, kept)
    assert living_children() == []
    assert "2 of 4 runs are done" in "\n".join(describe(targets(kept, [], 2.0, 2), kept))
    kept.reporter.on_note = lambda text: None
    (answer,) = transfer(targets(kept, [], 2.0, 2), kept)
    assert (answer.to, answer.budget_seconds, answer.incumbent) == ("arithmetic", 2.0, 2)
    assert answer.num_seeds == {"baseline": 2, "incumbent": 2}
    assert answer.interval[0] < answer.difference < answer.interval[1]
    assert answer.here_interval[0] < answer.here < answer.here_interval[1]
    assert answer.verdict == "transfers"
    first = RULES.seed(FIRST_SEED_INDEX + 2 * MAX_SEEDS * 2)
    assert run_names(kept) == [f"{side}-{first + n}" for side, n in
                               (("baseline", 0), ("baseline", 3), ("incumbent", 1), ("incumbent", 2))]  # fmt: skip
    before = {path: path.stat().st_mtime_ns for path in kept.ledger.runs_dir.glob("transfer/*/*/run.json")}
    (again,) = transfer(targets(kept, [], 2.0, 2), kept)
    assert again.difference == answer.difference
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())
    assert transfer(targets(kept, [], 2.0, 3), kept)[0].num_seeds == {"baseline": 3, "incumbent": 3}
    assert verify(kept.ledger).problems == []
    view = view_of(kept.ledger, kept.repo.head().branch, kept.now())
    assert "Elsewhere: arithmetic, 2 s of training: transfers" in render(view)


def test_what_cannot_be_asked_is_refused_in_one_line(setup: Setup) -> None:
    with pytest.raises(UsageError, match="nothing was kept"):
        targets(setup, ["arithmetic"], 2.0, 1)
    with pytest.raises(UsageError, match="nothing differs from the campaign"):
        targets(setup, [], None, 1)
    write(setup, GOOD)
    run_experiment(Request(), setup)
    for to, budget, said in (
        (["arithmetic"], None, "--to arithmetic is the campaign itself"),
        (["arithmetik"], None, 'environments/ has no "arithmetik". Did you mean "arithmetic"?'),
        (["gsm8k"], None, "models/arithmetic-base (trl, GPUs needed: 0) cannot answer gsm8k"),
        (["arithmetic"], 0.5, "--budget-seconds 0.5 is out of range"),
    ):
        with pytest.raises(UsageError) as raised:
            targets(setup, to, budget, 1)
        assert said in str(raised.value)
    assert run_names(setup) == []


def compared(difference: float, stderr: float) -> Comparison:
    return Comparison(
        created="2026-11-22T00:00:00+00:00",
        branch="autoresearch/x",
        rules_hash="abc",
        baseline_score=0.5,
        incumbent_score=0.5 + difference,
        difference=difference,
        interval=(difference - 2 * stderr, difference + 2 * stderr),
        num_seeds={"baseline": 3, "incumbent": 3},
        num_examples=100,
        estimator="as it says",
        stderr=stderr,
        df=60.0,
    )


def answer(difference: float, stderr: float, to: str = "there", model: str = "models/a") -> Transfer:
    found = compared(difference, stderr)
    return Transfer(
        **{field.name: getattr(found, field.name) for field in fields(found)},
        verdict=verdicts([found])[0],
        to=to,
        budget_seconds=60.0,
        model=model,
        model_here="models/a",
        incumbent=7,
        here=0.05,
        here_interval=(0.01, 0.09),
        unused_keys=("seq_len",),
    )


def test_of_several_questions_the_verdicts_are_holm_s() -> None:
    """p of 0.028 is enough alone, not beside another; beside a sure one it is the second, and enough again."""
    weak, sure, worse = compared(0.0225, 0.01), compared(0.06, 0.01), compared(-0.06, 0.01)
    assert verdicts([weak]) == ["transfers"]
    assert verdicts([weak, weak]) == ["not told apart"] * 2
    assert verdicts([weak, sure]) == ["transfers", "transfers"]
    assert verdicts([weak, worse, compared(0.0, 0.01)]) == ["not told apart", "does not", "not told apart"]


def test_the_page_says_the_verdict_among_those_asked_together(kept: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    weak = replace(compared(0.0225, 0.01), branch=kept.repo.head().branch)
    monkeypatch.setattr(transfers, "compare", lambda pairs, setup: weak)
    answers = transfer(targets(kept, ["arithmetic", "countdown"], 2.0, 1), kept)
    assert [answer.verdict for answer in answers] == ["not told apart"] * 2
    assert (
        summary(answers).count("note:             scored on the selection set, on which the incumbent was chosen") == 2
    )
    page = render(view_of(kept.ledger, kept.repo.head().branch, kept.now()))
    assert page.count("2 s of training: not told apart, experiment 0002") == 2
    (alone,) = transfer(targets(kept, ["countdown"], 2.0, 1), kept)
    assert alone.verdict == "transfers"


def test_the_summary_says_two_models_and_no_ratio() -> None:
    said = summary([answer(0.06, 0.01, "countdown", "models/b")])
    assert "\nverdict:          transfers\n" in said
    assert "\nhere:             +0.050000 (interval_95 +0.010000 +0.090000, the campaign's belief)\n" in said
    assert "\nmodels:           models/b there, models/a here: two models\n" in said
    assert "\nunused_keys:      seq_len" in said
    assert "models:" not in summary([answer(0.06, 0.01)])


def test_a_planted_answer_does_not_count(kept: Setup) -> None:
    folder = kept.ledger.runs_dir / "transfer" / "x"
    folder.mkdir(parents=True)
    (folder / "transfer.json").write_text("{")
    assert transfers.made(kept.ledger) == []
