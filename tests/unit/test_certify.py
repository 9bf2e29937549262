"""certify, end to end on a real git checkout, with stand-ins for the executor and for the training process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from nightshift_arithmetic import data

from nightshift.campaign.records import SIDES, Comparison, Request
from nightshift.errors import EngineError, Interrupted, UsageError
from nightshift.experiment.certify import FIRST_SEED_INDEX, Certified, certify, open_task
from nightshift.experiment.checkout import IntegrityError
from nightshift.experiment.experiment import Controller
from nightshift.files import remove_tree
from nightshift.night.observers import certified_line
from nightshift.report.data import certificates, gather
from nightshift.report.text import headline
from tests.checkouts import MEASURING
from tests.conftest import git, living_children
from tests.rules import ARITHMETIC_TRL
from tests.stand_in_controller import during, install_proofs, keep, make_poor, with_bench
from tests.stand_ins import NUM_VALIDATION, fault, quick

RULES = quick(ARITHMETIC_TRL)


def certified(controller: Controller, num_seeds: int | None = None) -> Comparison:
    """What `nightshift certify --seeds N` makes."""
    return certify(open_task(controller, num_seeds))


def stop_at(words: str) -> Callable[[str], None]:
    """A Ctrl-C when the news has these words."""

    def interrupt(text: str) -> None:
        if words in text:
            raise Interrupted("stopped by SIGINT")

    return interrupt


def num_scored(comparison: Comparison) -> list[int]:
    """Of the baseline and of the incumbent."""
    return [len(comparison.scores(side)) for side in SIDES]


@pytest.fixture
def controller(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    """A campaign whose baseline is poor."""
    monkeypatch.setattr("secrets.randbelow", lambda number: 0)
    controller = make_poor(checkout, RULES, monkeypatch)
    controller.run(Request())
    return controller


@pytest.fixture
def kept(controller: Controller) -> Controller:
    return keep(controller)


def test_a_certificate_from_new_seeds_on_the_test_split(kept: Controller) -> None:
    kept.reporter.notes.clear()
    made = certified(kept)
    assert kept.ledger.comparisons() == [made]
    assert num_scored(made) == [3, 3]
    assert made.num_examples == NUM_VALIDATION
    assert (made.access, made.level, made.verdict) == (1, 0.025, "better")
    sides = made.score("baseline"), made.score("incumbent")
    assert made.strict_scores == pytest.approx(sides)  # all end with `#### n`
    low, high = made.estimate.interval
    assert 0.1 < low < made.estimate.difference < high
    assert made.estimate.difference == pytest.approx(made.score("incumbent") - made.score("baseline"))
    first = RULES.first_seed + FIRST_SEED_INDEX
    assert sorted(path.parent.name for path in kept.ledger.runs_dir.glob("certify/*/*/run.json")) == [
        *(f"baseline-{first + offset}" for offset in (0, 3, 4)),
        *(f"incumbent-{first + offset}" for offset in (1, 2, 5)),
    ]
    used = {record.result.seed for record in kept.ledger.records() if record.result}
    assert max(used) < first
    began = [note.split(",")[0] for note in kept.reporter.notes if ": run " in note]
    assert began == ["baseline", "incumbent", "incumbent", "baseline", "baseline", "incumbent"]
    first_run = made.runs[0]
    assert f"baseline, seed {first_run.seed}: {100 * first_run.score:.1f} (3 steps)" in kept.reporter.notes
    assert f"baseline {100 * first_run.score:.1f} (3 steps), " in str(Certified(plan=(), comparisons=(made,)))
    assert living_children() == []


def test_the_scores_are_those_of_the_test_split_and_none_of_these_stays_in_runs(kept: Controller) -> None:
    """The stand-in answers by a digest of the question, so its score tells which questions it was asked."""
    certified(kept, num_seeds=1)
    (path,) = kept.ledger.runs_dir.glob("certify/*/incumbent-*/result.json")
    scores = json.loads(path.read_text())["evaluation"]["scores"]
    assert len(scores) == NUM_VALIDATION
    validation = kept.ledger.records()[-1].result.evaluation
    assert tuple(scores) != validation.example_scores
    assert abs(sum(scores) / NUM_VALIDATION - validation.eval_score) < 0.08
    questions = [example.question for example in data.load("test", NUM_VALIDATION)]
    files = [path for path in kept.ledger.runs_dir.rglob("certify/**/*") if path.is_file()]
    names = {"plan.json", "comparison.json", "run.json", "metrics.jsonl", "result.json", "trainer.log"}
    assert {path.name for path in files} == names
    for path in files:
        assert not any(question in path.read_text() for question in questions)


@pytest.mark.parametrize("gone", ["journal.jsonl", "certify"])
def test_a_use_of_the_test_split_counts_without_its_journal_and_without_its_certificate(kept, gone) -> None:
    certified(kept, num_seeds=1)
    remove_tree(kept.ledger.runs_dir / gone)
    assert certified(kept, num_seeds=1).access == 2


def test_an_interrupted_certificate_is_resumed_by_its_number_and_is_the_same_access(kept: Controller) -> None:
    kept.reporter.on_note = stop_at("run 4 of 6")
    with pytest.raises(Interrupted, match="To finish the comparison: uv run nightshift certify --resume 0001"):
        certified(kept)
    assert certificates(kept.ledger, kept.campaign()) == (None, 1)
    assert living_children() == []
    assert kept.ledger.comparisons() == []
    kept.reporter.on_note = lambda text: None
    with pytest.raises(UsageError, match="Leave out other options"):
        open_task(kept, 5, resume=1)
    with pytest.raises(UsageError, match="--resume 0002: there is no such comparison"):
        open_task(kept, resume=2)
    another = open_task(kept)
    assert another.plan.number == 2
    kept.reporter.notes.clear()
    made = certify(open_task(kept, resume=1))
    assert sum(": run " in note for note in kept.reporter.notes) == 3
    assert num_scored(made) == [3, 3]
    assert {access.number for access in kept.ledger.accesses()} == {made.access} == {1}


def test_a_harness_that_changes_under_a_run_on_the_test_split_certifies_nothing(kept: Controller) -> None:
    path = kept.bench.root / MEASURING
    with during(kept, lambda folder: path.write_text("MEASURES = 1")), pytest.raises(IntegrityError, match=MEASURING):
        certified(kept, num_seeds=1)


def test_a_crashed_run_is_not_repeated_and_the_verdict_says_so(kept: Controller) -> None:
    kept.reporter.on_note = lambda text: text.endswith("run 2 of 4") and fault(kept.ledger.runs_dir, "error", once=True)
    made = certified(kept, 2)
    assert num_scored(made) == [2, 1]
    assert made.notes[1].startswith("incumbent, seed 101001: crashed: loss is nan")
    assert "unequal numbers of scored runs" in made.notes[2]
    crashes = "1 of 2 runs of the incumbent crashed"
    [line] = [line for line in str(Certified(plan=(), comparisons=(made,))).splitlines() if line.startswith("verdict:")]
    assert line.endswith(f"; {crashes}")
    assert certified_line(made).endswith(f"; {crashes}")
    branch = kept.repo.head().branch
    assert headline(gather(kept.ledger, branch)).title.endswith(f" pp ({crashes})")


def test_a_side_without_a_run_is_no_certificate(kept: Controller) -> None:
    fault(kept.ledger.runs_dir, "error", once=False)
    with pytest.raises(EngineError, match="no run of the baseline was evaluated: crashed: loss is nan"):
        certified(kept, num_seeds=1)
    assert kept.ledger.comparisons() == []
    assert living_children() == []


def test_what_cannot_be_certified_is_refused_and_nothing_is_counted(controller: Controller) -> None:
    with pytest.raises(UsageError, match="no change is kept, so the incumbent is the baseline"):
        certified(controller)
    with pytest.raises(UsageError, match=r"began with rules [0-9a-f]+; now: other"):
        certified(with_bench(controller, rules_hash="other"))
    (controller.bench.root / MEASURING).write_text("MEASURES = 'better'\n")
    with pytest.raises(IntegrityError, match=f"{MEASURING} differ from commit"):
        certified(controller)
    git(controller.bench.root, "switch", "--quiet", "--discard-changes", "main")
    with pytest.raises(UsageError, match="main has no campaign with a baseline"):
        certified(controller)
    assert controller.ledger.accesses() == []


def test_the_plan_reads_nothing(kept: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    load = data.load
    monkeypatch.setattr(data, "load", lambda split, size: load(split, size) if split != "test" else pytest.fail("read"))
    task = open_task(kept)
    lines = task.describe()
    assert lines[0] == "certify:  experiment 0001 + 0002 (incumbent), compared with experiment 0001 (baseline)"
    assert "runs:     3 new seeds for each config, 400 examples of the test split" in lines
    assert kept.ledger.accesses() == []
    assert not (kept.ledger.runs_dir / "certify").exists()


def test_a_comparison_on_several_environments_is_resumed_by_its_number(kept: Controller) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        open_task(kept, environment="nowhere")
    planned = open_task(kept, 1, environment="arithmetic+countdown")
    assert planned.controller.bench.rules.environment_names == ("arithmetic", "countdown")
    kept.reporter.on_note = stop_at("run 1 of 2")
    with pytest.raises(Interrupted):
        certify(planned)
    assert open_task(kept, resume=1).plan == planned.plan


def test_two_commits_are_compared(kept: Controller) -> None:
    revisions = {"baseline": "HEAD~1", "incumbent": "HEAD"}
    answer = certify(open_task(kept, 1, revisions=revisions))
    assert answer.plan.names == revisions
    assert (answer.plan.split, answer.access) == ("test", 1)
    assert answer.estimate.difference > 0
    with pytest.raises(UsageError, match="both commits have the same train"):
        open_task(kept, revisions={"baseline": "HEAD", "incumbent": "HEAD"})
    with pytest.raises(UsageError, match="--incumbent 1234567: there is no such commit"):
        open_task(kept, revisions={"baseline": "HEAD", "incumbent": "1234567"})


def test_each_run_is_proven_before_its_weights_go_and_one_that_is_not_is_made_again(kept, monkeypatch):
    def is_bad(run_dir: Path) -> bool:
        assert (run_dir / "weights" / "model.safetensors").is_file()
        return proofs == []

    proofs = install_proofs(monkeypatch, 2, is_bad)
    made = certified(kept, num_seeds=1)
    first, second, again = (proof.run_dir.name for proof in proofs)
    assert first == again
    assert any("infrastructure failure: the server did not serve the file" in note for note in kept.reporter.notes)
    proven = [f"{name.replace('-', ', seed ')}: served = file: proven" for name in (first, second)]
    assert sorted(note for note in made.notes if "served" in note) == sorted(proven)
    assert not list(kept.ledger.runs_dir.glob("certify/**/weights"))
