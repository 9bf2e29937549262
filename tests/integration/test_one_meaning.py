"""One campaign, every view: a number has one value and one name wherever it is shown."""

from __future__ import annotations

import csv
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nightshift.agents.brief import describe
from nightshift.agents.history import history, load_configs
from nightshift.campaign.campaign import Campaign, expected
from nightshift.campaign.cost import runs_cost
from nightshift.campaign.index import last_campaign
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Failure, Record, Verdict
from nightshift.campaign.standing import Z95, Counts, Expected, effect_at_decision
from nightshift.cli.output import summary
from nightshift.cli.status import Status, experiment_lines
from nightshift.night.summary import one_line
from nightshift.report.page import render, view_of, write_report
from tests.checkouts import commit_all
from tests.stand_in_campaign import BRANCH, build

NOW = datetime(2026, 11, 21, 7, tzinfo=UTC)


class Rows(HTMLParser):
    """What the page's table says of each experiment."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, str]] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = {name: value or "" for name, value in attrs}
        if tag == "tbody" and "data-number" in fields:
            self.rows[int(fields["data-number"])] = fields


class Seen:
    """A campaign of a hundred experiments, with crashes, take-backs and discards, and all that shows it."""

    def __init__(self, root: Path) -> None:
        self.ledger = build(root, 100, num_examples=200)
        (root / "train.toml").write_bytes(self.ledger.source(1))
        (root / ".gitignore").write_text("runs/\nresults.tsv\nreport/\n")
        commit_all(root, BRANCH)
        self.records = self.ledger.records()
        self.campaign = Campaign.of(self.records, *last_campaign(self.records))
        view = view_of(self.ledger, BRANCH, NOW)
        self.page, self.title = render(view), view.headline.title
        self.rows = Rows(self.page).rows
        write_report(root, NOW, root / "report")
        self.markdown = (root / "report" / "report.md").read_text()
        with (root / "results.tsv").open() as file:
            self.tsv = {int(row["run"]): row for row in csv.DictReader(file, delimiter="\t")}

    @property
    def compared(self) -> list[Record]:
        return [record for record in self.records if effect_at_decision(record) is not None]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    found = Seen(tmp_path_factory.mktemp("campaign"))
    statuses = {record.status for record in found.records}
    assert statuses >= {"keep", "discard", "crash"}
    assert found.campaign.taken_back, "another seed: no keep of this campaign is taken back"
    assert found.campaign.last_expected, "another seed: nothing is forgotten"
    return found


def half(found: Expected) -> float:
    return Z95 * found.stderr


def test_what_a_run_says_of_itself_is_what_its_verdict_said(seen: Seen) -> None:
    for record in seen.compared:
        then = effect_at_decision(record)
        assert then is not None
        lines = dict(line.split(":", 1) for line in summary(record, "").splitlines() if ":" in line)
        assert float(lines["effect_at_decision"]) == pytest.approx(then.mean, abs=1e-6)
        assert float(seen.tsv[record.number]["effect_at_decision"]) == pytest.approx(then.mean, rel=1e-4, abs=1e-6)
        row = seen.rows[record.number]
        assert float(row["data-then"]) == pytest.approx(then.mean, rel=1e-4, abs=1e-6)
        assert float(row["data-then-half"]) == pytest.approx(half(then), rel=1e-4, abs=1e-6)


def test_every_table_says_what_is_believed_now(seen: Seen) -> None:
    tried = history(seen.campaign, load_configs(seen.ledger, seen.campaign.decided))
    by_number = {trial.number: trial for each in tried for trial in each.trials}
    moved = 0
    for record in seen.compared:
        now, then = expected(seen.campaign, record), effect_at_decision(record)
        assert now is not None
        moved += now != then
        row = seen.rows[record.number]
        assert float(row["data-expected"]) == pytest.approx(now.mean, rel=1e-4, abs=1e-6)
        assert float(row["data-expected-half"]) == pytest.approx(half(now), rel=1e-4, abs=1e-6)
        assert by_number[record.number].effect == now
        assert f" {now}" in one_line(record, seen.campaign)
        assert f" {now}: " in describe(record, now)
        told = f"{100 * now.mean:+.1f} ± {100 * half(now):.1f}".replace("-", "\N{MINUS SIGN}")
        assert re.sub(r"[+\N{MINUS SIGN}](?=0\.0 ±)", "", f"| {told} |") in re.sub(
            r"[+\N{MINUS SIGN}](?=0\.0 ±)", "", seen.markdown.replace(" pp", "")
        )
    assert moved > len(seen.compared) / 2


def test_where_both_are_shown_both_have_their_names(seen: Seen) -> None:
    record = next(r for r in seen.compared if expected(seen.campaign, r) != effect_at_decision(r))
    shown = "\n".join(experiment_lines(seen.ledger, record))
    for name, found in (
        ("effect", expected(seen.campaign, record)),
        ("effect_at_decision", effect_at_decision(record)),
    ):
        assert found is not None
        assert re.search(rf"^{name}: +{re.escape(f'{found.mean:+.4f} ± {half(found):.4f}')}$", shown, re.M)
    detail = seen.page.partition(f'id="detail-{record.number:04d}"')[2].partition("</tbody>")[0]
    assert "effect_at_decision" in detail


def test_no_view_calls_it_anything_else(seen: Seen) -> None:
    shown = "\n".join("\n".join(experiment_lines(seen.ledger, r)) for r in seen.records)
    for text in (seen.page, seen.markdown, "\t".join(seen.tsv[1]), summary(seen.records[3], ""), shown):
        assert not re.search(r"(?<![\w-])deltas?\b(?!_stderr)", re.sub(r"<script.*?</script>", "", text, flags=re.S))


def test_experiments_are_counted_one_way(seen: Seen) -> None:
    counts = Counts.of(seen.records, seen.campaign.taken_back)
    assert counts.kept == sum(r.is_keep for r in seen.records) - 1
    assert counts.crashed == sum(
        r.status == Verdict.CRASH and r.failure is not Failure.INTERRUPTED for r in seen.records
    )
    assert f"counted:  {counts}" in Status.of(seen.ledger, NOW).lines()
    assert str(counts).partition(": ")[2] in seen.markdown
    assert f"cost:     {runs_cost(seen.records)}" in Status.of(seen.ledger, NOW).lines()
    assert f"Spent: {runs_cost(seen.records)}." in seen.page
    assert f"Spent: {runs_cost(seen.records)}." in seen.markdown
    for group, number in (("keep", counts.kept), ("discard", counts.discarded), ("crash", counts.crashed)):
        assert sum(row["data-group"] == group for row in seen.rows.values()) == number


def test_the_incumbent_has_one_expected_score(seen: Seen) -> None:
    standing = seen.campaign.standing
    assert standing is not None
    assert f"{standing.baseline:.3f}" in seen.title
    assert f"{standing.incumbent:.3f}" in seen.title
    best = next(line for line in Status.of(seen.ledger, NOW).lines() if line.startswith("incumbent:"))
    assert f"expected score {standing.incumbent:.4f}, baseline {standing.baseline:.4f}" in best
    assert standing.incumbent >= standing.baseline
    assert isinstance(seen.ledger, Ledger)
