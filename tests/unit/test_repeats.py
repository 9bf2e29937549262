"""Equal settings are one more run of their parent: never kept, believed as a second run is, and shown by all."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from nightshift.agents.brief import describe
from nightshift.agents.history import history
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.records import Record, Request, Verdict
from nightshift.campaign.results import COLUMNS, row
from nightshift.cli.output import summary
from nightshift.config.decision_rules import DecisionRules
from nightshift.config.train_toml import parse
from nightshift.experiment.experiment import run_experiment
from nightshift.night.summary import one_line
from nightshift.report.markdown import summary as markdown
from nightshift.report.page import render, view_of
from tests import rules as known_rules
from tests.campaigns import BASELINE, BRANCH, a_record, a_result, folded, replace, stored
from tests.conftest import git
from tests.rules import ARITHMETIC_TRL
from tests.stand_in_setup import furnish, make_setup
from tests.stand_ins import quick

ONE_WORLD = replace(
    known_rules.ONE_WORLD, prior_sd=0.08, seed_sd=0.02, take_back=0.008
)  # as 0.1.0 had it for arithmetic
RULES = ARITHMETIC_TRL.decision
NUM = 400
Story = Sequence[tuple[str, float]]  # settings and the score of each experiment


def told(story: Story, rules: DecisionRules = RULES, num_examples: int = NUM) -> list[Record]:
    """A campaign as experiment.py decides it; each experiment is a child of the incumbent of its time."""
    records, campaign = list[Record](), Campaign()
    for number, (settings, score) in enumerate(story, 1):
        result = a_result(score, num_examples, 1000)
        parent = campaign.incumbent.number if campaign.incumbent else None
        changes = {"config_hash": f"{number}", "decision_rules": rules, "result": result}
        record = a_record(number=number, decided=number, parent=parent, **changes, effective_hash=settings)
        records.append(campaign.judge(record))
        campaign = campaign.step(records[-1])
    return records


@pytest.mark.parametrize("score", [0.20, 0.45, 0.50, 0.55, 0.80])
@pytest.mark.parametrize("rules", [RULES, ONE_WORLD], ids=["today", "one world"])
def test_equal_settings_are_never_kept_whatever_they_score(score: float, rules: DecisionRules) -> None:
    first, again = told([("a", 0.50), ("a", score)], rules)
    assert again.judgement
    assert (again.status, again.judgement.why) == ("discard", "the settings of 0001: one more run of it")
    assert (again.judgement.delta, again.judgement.delta_stderr, again.judgement.p_better) == (None, None, None)
    campaign = folded([first, again])
    assert (campaign.kept, campaign.incumbent, campaign.since) == ((first,), first, {})
    (other,) = told([("a", 0.50), ("b", score)], rules)[1:]
    assert (other.status == Verdict.KEEP) == (score >= 0.50), "it is the settings that decide"


@pytest.mark.parametrize("score", [0.42, 0.50, 0.58])
def test_it_moves_and_narrows_its_parent_as_the_textbook_s_second_run_does(score: float) -> None:
    """One world: precision adds, and the mean is weighed by it."""
    first, again = told([("a", 0.50), ("a", score)], ONE_WORLD)
    before, after = Campaign().step(first), folded([first, again])
    assert before.belief
    assert after.belief
    (s2,) = after.belief.run_variance(ONE_WORLD)
    precision = 1 / before.belief.sd**2 + 1 / s2
    assert after.belief.mean == pytest.approx((0.50 / before.belief.sd**2 + score / s2) / precision)
    assert after.belief.sd == pytest.approx(precision**-0.5)
    assert after.belief.sd < 0.8 * before.belief.sd


def test_in_all_worlds_together_it_informs_too_and_nearly_as_a_second_run_of_one_world_does() -> None:
    first, again = told([("a", 0.50), ("a", 0.52)])
    before, after = Campaign().step(first).belief, folded([first, again]).belief
    assert before
    assert after
    assert after.mean == pytest.approx(0.51, abs=0.002)
    assert after.sd == pytest.approx(float(before.sd) / 2**0.5, rel=0.15)


def test_a_repeat_that_disappoints_takes_its_parent_back() -> None:
    story = [("a", 0.50), ("b", 0.54), ("b", 0.30)]
    records = told(story)
    assert [record.status for record in records] == ["keep", "keep", "discard"]
    judgement = records[2].judgement
    assert judgement
    assert judgement.taken_back_to == 1
    assert judgement.why.startswith("the settings of 0002: one more run of it; 0002 is taken back: 0001 is expected +")
    assert folded(records).incumbent == records[0]
    assert folded(records).since == {2: "taken back"}


def test_the_settings_of_a_config_that_is_not_the_parent_are_an_idea() -> None:
    """0004 has the baseline's settings and is a child of 0002: what undoes a keep is a change of it."""
    records = told([("a", 0.50), ("b", 0.60), ("c", 0.30), ("a", 0.50)])
    assert (records[3].parent, records[3].status) == (2, "discard")
    assert records[3].judgement
    assert records[3].judgement.delta is not None


def test_all_that_shows_records_shows_a_repeat_without_numbers_it_does_not_have(tmp_path: Path) -> None:
    again = told([("a", 0.50), ("a", 0.80), ("b", 0.65)])
    ledger = stored(tmp_path, again)
    cells = dict(zip(COLUMNS, row(again[1]).split("\t"), strict=True))
    assert (cells["status"], cells["effect_at_decision"], cells["p_better"]) == ("discard", "", "")
    lines = summary(again[1], "").splitlines()
    assert {"effect_at_decision:", "p_better:", "decision:         discard"} <= set(lines)
    assert "why:              the settings of 0001: one more run of it" in lines
    assert one_line(again[1], folded(again)).split()[:2] == ["0002", "discard"]
    assert describe(again[1]).startswith("0002 discard (the settings of 0001: one more run of it): ")
    unused = BASELINE.replace(b"group_size", b"max_off_policy_steps = 2\ngroup_size")  # by this engine
    sources = {1: BASELINE, 2: unused, 3: BASELINE.replace(b"6e-7", b"3e-6")}
    keys = history(folded(again), {number: parse(source) for number, source in sources.items()})
    assert [[trial.number for trial in key.trials] for key in keys] == [[3]], "nothing was tried by it"
    view = view_of(ledger, BRANCH, datetime(2026, 11, 22, tzinfo=UTC), None)
    page, text = render(view), markdown(view.morning, view.headline, view.nights, False)
    assert 'id="run-0002"' in page
    assert "the settings of 0001: one more run of it" in page
    (line,) = (line for line in text.splitlines() if line.startswith("| 0002 "))
    assert "| discard | 0.800 |" in line
    assert "pp" not in line


def test_the_same_settings_never_see_a_seed_twice_though_their_text_differs(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    furnish(checkout)
    setup = make_setup(checkout, replace(quick(ARITHMETIC_TRL), learning_rate_scale=200.0), monkeypatch)
    source = b"max_steps = 3\n[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = 3e-6\n"
    unused = b"[orchestrator]\nmax_off_policy_steps = %d"  # of no use to this engine
    texts = [source, *(source.replace(b"[orchestrator]", unused % steps) for steps in (2, 3))]
    (checkout / "train.toml").write_bytes(source)
    git(checkout, "commit", "--quiet", "--all", "-m", "baseline config")
    records = []
    for text in texts:
        (checkout / "train.toml").write_bytes(text)
        records.append(run_experiment(Request(again=text != source), setup))
    assert len({record.config_hash for record in records}) == 3
    assert len({record.effective_hash for record in records}) == 1
    assert [record.result.seed for record in records if record.result] == [1000, 1001, 1002]
    assert [record.status for record in records] == ["keep", "discard", "discard"]
    assert records[2].judgement
    assert records[2].judgement.why == "the settings of 0001: one more run of it"
    assert (checkout / "train.toml").read_bytes() == source
