"""One campaign, every view: a number has one value and one name wherever it is shown."""

import csv
import re
from pathlib import Path
from unittest import mock

import pytest

from nightshift.agents.brief import describe
from nightshift.agents.history import kept_changes
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.cost import runs_cost
from nightshift.campaign.records import Z95, Effect, Failure, Record, Verdict, percent
from nightshift.campaign.results import Counts, gain_text, last_campaign
from nightshift.cli.output import summary
from nightshift.cli.status import Status, experiment_lines
from nightshift.night.summary import one_line
from nightshift.report.page import render, view_of, write_report
from tests.checkouts import commit_all
from tests.integration.test_report import NOW, Page
from tests.stand_in_campaign import BRANCH, build


class Seen:
    """A campaign of eighty experiments, with crashes, riders, reverts and last runs, and all that shows it."""

    def __init__(self, root: Path) -> None:
        self.ledger = build(root, 80, seed=4, num_examples=200)
        (root / "train.toml").write_bytes(self.ledger.source(1))
        (root / ".gitignore").write_text("runs/\nresults.tsv\nreport/\n")
        commit_all(root, BRANCH)
        self.records = self.ledger.records()
        self.campaign = Campaign.of(self.records, *last_campaign(self.records))
        view = view_of(self.ledger, BRANCH, NOW)
        self.page, self.title = render(view), view.headline.title
        bodies = [fields for tag, fields in Page(self.page).elements if tag == "tbody" and "data-number" in fields]
        self.rows = {int(fields["data-number"] or ""): fields for fields in bodies}
        with mock.patch("nightshift.report.png.draw", return_value=b""):
            write_report(root, NOW, root / "report")
        self.markdown = (root / "report" / "report.md").read_text()
        with (root / "results.tsv").open() as file:
            self.tsv = {int(row["run"]): row for row in csv.DictReader(file, delimiter="\t")}
        self.status = Status.of(self.ledger, NOW).lines()

    @property
    def compared(self) -> list[tuple[Record, Effect, Effect]]:
        """The experiments with a new change that was measured; its effect at the decision and now."""
        found = []
        for record in self.records:
            then = record.decision and record.decision.estimate
            now = self.campaign.effect(record)
            assert (then is None) == (now is None)
            found += [(record, then, now)] if then and now else []
        return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    found = Seen(tmp_path_factory.mktemp("campaign"))
    assert {record.status for record in found.records} == {*Verdict}
    became = {found.campaign.since(record) for record in found.records}
    assert became >= {"", "unconfirmed", "reverted", "replaced"}, "choose another seed"
    assert sum(record.run.rider is not None for record in found.records) >= 3
    return found


def half(effect: Effect) -> float:
    return Z95 * effect.sd


def test_what_a_run_says_of_itself_is_what_its_verdict_said(seen: Seen) -> None:
    for record, then, _ in seen.compared:
        lines = dict(line.split(":", 1) for line in summary(record).splitlines() if ":" in line)
        assert float(lines["effect_at_decision"]) == pytest.approx(then.mean, abs=1e-6)
        assert float(lines["p_helps"]) == pytest.approx(then.p_helps, abs=0.005)
        assert f"effect {then}, P(it helps) {percent(then.p_helps)} %: " in lines["why"]
        cells = seen.tsv[record.number]
        assert float(cells["effect_at_decision"]) == pytest.approx(then.mean, rel=1e-4, abs=1e-6)
        assert float(cells["p_helps"]) == pytest.approx(then.p_helps, rel=1e-4)
        row = seen.rows[record.number]
        assert float(row["data-then"]) == pytest.approx(then.mean, rel=1e-4, abs=1e-6)
        assert float(row["data-then-half"]) == pytest.approx(half(then), rel=1e-4, abs=1e-6)


def test_every_table_says_what_is_believed_now(seen: Seen) -> None:
    moved = 0
    for record, then, now in seen.compared:
        moved += now != then
        row = seen.rows[record.number]
        assert float(row["data-effect"]) == pytest.approx(now.mean, rel=1e-4, abs=1e-6)
        assert float(row["data-effect-half"]) == pytest.approx(half(now), rel=1e-4, abs=1e-6)
        assert f" {now}" in one_line(record, seen.campaign)
        told = f"{100 * now.mean:+.1f} ± {100 * half(now):.1f}".replace("-", "\N{MINUS SIGN}")
        assert re.sub(r"[+\N{MINUS SIGN}](?=0\.0 ±)", "", f"| {told} |") in re.sub(
            r"[+\N{MINUS SIGN}](?=0\.0 ±)", "", seen.markdown.replace(" pp", "")
        )
    assert moved > len(seen.compared) / 2


def test_a_rider_is_named_wherever_its_run_is(seen: Seen) -> None:
    for record in seen.records:
        if (rider := record.run.rider) is not None and record.judgement is not None:
            assert f"\nrider:            {rider.name}\n" in summary(record)
            assert seen.tsv[record.number]["rider"] == rider.name
            again = f"(also re-testing {rider.name})"
            assert again in one_line(record, seen.campaign)
            assert again in describe(record)
            assert again[1:-1] in seen.page.partition(f'id="run-{record.number:04d}"')[2][:1500]
            assert record.status == Verdict.CRASH or again in record.judgement.why


def test_where_both_are_shown_both_have_their_names(seen: Seen) -> None:
    record, then, now = next(each for each in seen.compared if each[1] != each[2])
    shown = "\n".join(experiment_lines(seen.ledger, record))
    for name, effect in (("effect", now), ("effect_at_decision", then)):
        assert re.search(rf"^{name}: +{re.escape(effect.with_p)}$", shown, re.M)
    detail = seen.page.partition(f'id="detail-{record.number:04d}"')[2].partition("</tbody>")[0]
    assert "effect_at_decision" in detail


def test_the_kept_changes_are_the_same_everywhere(seen: Seen) -> None:
    names = [change.name for change in seen.campaign.kept]
    assert len(names) > 3
    assert [line.split()[1].rstrip(":") for line in seen.status if line.startswith("kept: ")] == names
    by_p = [line.split()[0] for line in kept_changes(seen.campaign)]
    p_helps = {change.name: seen.campaign.posterior.effect(change).p_helps for change in seen.campaign.kept}
    assert by_p == sorted(names, key=lambda name: -p_helps[name])
    rows = re.findall(r"^\| (\d{4}) \|[^|]*\| \d+ % \|", seen.markdown, re.M)
    assert rows[: len(by_p)] == by_p, "report.md lists them by P, too"


def test_experiments_are_counted_one_way(seen: Seen) -> None:
    counts = Counts.of(seen.records, seen.campaign.kept)
    assert counts.kept == sum(r.is_keep for r in seen.records) - 1
    assert counts.crashed == sum(
        r.status == Verdict.CRASH and r.failure is not Failure.INTERRUPTED for r in seen.records
    )
    assert f"counted:  {counts}" in seen.status
    assert str(counts).partition(": ")[2] in seen.markdown
    assert f"cost:     {runs_cost(seen.records)}" in seen.status
    assert f"Spent: {runs_cost(seen.records)}." in seen.page
    assert f"Spent: {runs_cost(seen.records)}." in seen.markdown
    for group, number in (("keep", counts.kept), ("discard", counts.discarded), ("crash", counts.crashed)):
        assert sum(row["data-group"] == group for row in seen.rows.values()) == number


def test_the_incumbent_has_one_expected_score_and_one_gain(seen: Seen) -> None:
    standing = seen.campaign.standing
    assert standing is not None
    assert standing.incumbent - standing.baseline == pytest.approx(standing.gain)
    best = next(line for line in seen.status if line.startswith("incumbent:"))
    assert (
        f"expected score {standing.incumbent:.4f}, baseline {standing.baseline:.4f}: {gain_text(standing)} by " in best
    )
    assert gain_text(standing) in seen.title
    assert not any("--baseline" in line for line in seen.status), "its night measured the baseline again"
