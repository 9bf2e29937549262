"""One campaign, every view: the row of an experiment is the same wherever it is printed, digit by digit."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nightshift.agents.base import Context
from nightshift.agents.brief import compose, logs
from nightshift.agents.history import kept_changes, of_last_campaign
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import (
    Action,
    Change,
    Decision,
    Part,
    Record,
    Request,
    Run,
    packed,
    percent,
)
from nightshift.campaign.results import COLUMNS, Counts, Row, last_campaign
from nightshift.cli.output import plain as plain_json
from nightshift.cli.output import summary
from nightshift.cli.run import plan
from nightshift.cli.status import Status, all_lines, experiment_lines, shown
from nightshift.config.train_toml import parse
from nightshift.errors import Failure
from nightshift.experiment.experiment import Controller
from nightshift.night.observers import experiment_line
from nightshift.report import diff as compare
from nightshift.report import markdown, text
from nightshift.report.data import Story, gather
from nightshift.report.export.table import as_csv, cell
from nightshift.report.page import render, view_of
from nightshift.text import clean
from tests.campaigns import BRANCH, a_record, a_result, context_after, replace, tell
from tests.conftest import git
from tests.integration.test_report import NOW, Page
from tests.rules import ARITHMETIC_TRL
from tests.stand_in_controller import keep, make_poor, write
from tests.stand_ins import quick

LR, GROUP, DECAY, NORM = (
    *("trainer.optim.lr", "orchestrator.group_size", "trainer.optim.weight_decay", "trainer.optim.max_norm"),
)


def measured(score: float) -> dict[str, Any]:
    """The fields of a run on two environments."""
    result = a_result(score, 1000)
    sizes = {"arithmetic": 600, "gsm8k": 400}
    scores = packed([float(i < size * score) for size in sizes.values() for i in range(size)])
    parts = tuple(Part(name, size, 1.0, score, 0.01) for name, size in sizes.items())
    evaluation = replace(result.evaluation, eval_score=score, scores=scores, parts=parts, strict_score=score / 2)
    return {
        "result": replace(result, evaluation=evaluation),
        "rules_name": "arithmetic+gsm8k-trl",
        "total_seconds": 91.25,
    }


def experiment(ledger: Ledger, changes: dict[str, Any], score: float | None, **fields: object) -> Record:
    number = ledger.next_number()
    extra = {} if score is None else measured(score)
    return tell(ledger, changes, score, description=f"idea {number}", **extra, **fields)


def revert_by_user(ledger: Ledger, change: Change) -> None:
    """The incumbent runs again after a commit of the user's took out a change."""
    records = ledger.records()
    decision = Decision(change=change, action=Action.REVERT, commit="c" * 40)
    num_decided = ledger.num_decided()
    fields = {"branch": BRANCH, "rules_hash": "rules", "parent": 1, "diff": (), "git_action": "nothing"}
    record = a_record(number=ledger.next_number(), decided_before=num_decided, user_decisions=(decision,), **fields)
    kept = Campaign.of([*records, record], BRANCH, "rules").kept
    record = replace(record, run=Run(kept=kept), **measured(0.7))
    record = ledger.reserve(record, ledger.source(1))
    campaign = Campaign.of([*records, record], BRANCH, "rules")
    assert campaign.baseline
    ledger.close(campaign.judge(replace(record, decided=num_decided + 1), ledger.stored_config(campaign.baseline)))


class Seen:
    """A campaign with a replaced key, a keep after a re-test, a crash, an interruption and a user's revert."""

    def __init__(self, root: Path) -> None:
        self.ledger = ledger = Ledger(root)
        experiment(ledger, {LR: 6e-7}, 0.4)
        experiment(ledger, {LR: 3e-6}, 0.5)
        retest = experiment(ledger, {GROUP: 8}, 0.485).run.new
        experiment(ledger, {DECAY: 0.1}, None)
        experiment(ledger, {LR: 6e-6}, 0.64)
        experiment(ledger, {NORM: 0.5}, 0.62)
        experiment(ledger, {}, 0.75, rider=retest)
        cut = replace(experiment(ledger, {DECAY: 0.2}, None), failure=Failure.INTERRUPTED, decided=None)
        ledger.close(cut)
        reverted = experiment(ledger, {DECAY: 0.05}, 0.78).run.new
        assert reverted
        revert_by_user(ledger, reverted)
        self.records = ledger.records()
        self.campaign = Campaign.of(self.records, *last_campaign(self.records))
        self.rows = self.campaign.rows(self.records)
        self.view = view_of(ledger, NOW)
        self.page = render(self.view)
        self.status = Status.of(ledger, NOW)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(tmp_path_factory.mktemp("campaign"))


def test_every_view_prints_the_row(seen: Seen) -> None:
    tsv = list(csv.DictReader(io.StringIO(seen.ledger.tsv_path.read_text()), delimiter="\t"))
    table = list(csv.DictReader(io.StringIO(as_csv(Story.of(seen.ledger, BRANCH)).decode())))
    data = Page(seen.page).data["rows"]
    report = markdown.summary(seen.view).splitlines()
    memory, context = of_last_campaign(seen.ledger), context_after(seen.ledger)
    runs, prompt = {run.number: run for run in memory.runs}, compose(context)
    tables, _, _ = logs(context)["history.txt"].decode().partition("untried keys")
    assert tables in str(memory)
    for record, row, *views in zip(seen.records, seen.rows, tsv, table, data, strict=True):
        check(row, seen.ledger, record, *views)
        cells, p_helps = views[2]["cells"], text.UNKNOWN if row.p_helps is None else percent(row.p_helps)
        assert [*cells.values()][:3] == [text.score(row.eval_score), text.plus_minus(row.effect), p_helps]
        start = " | ".join([f"| {row.number:04d}", row.verdict or "", row.now, *cells.values()])
        assert any(line.startswith(f"{start} | ") for line in report)
        if row.verdict != "interrupted":
            assert plain(runs[row.number]).items() >= plain(row).items()
            assert f"\n| {clean(str(runs[row.number]))}\n" in prompt
        verdict = "crash (config)" if row.verdict == "crash" else row.verdict
        figures = [f"measured {100 * score:.1f} %" for score in (row.eval_score,) if score is not None]
        figures += [f"effect {row.effect}"] if row.effect else []
        line = experiment_line(record)
        assert line.startswith(f"{row.number:04d} ")
        assert f": {', '.join([*figures, verdict])}: " in line


def plain(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(msgspec.json.encode(row))
    return {name: str(value) if isinstance(value, dict | list) else value for name, value in found.items()}


def check(row: Row, ledger: Ledger, record: Record, tsv: Any, table: Any, body: Any) -> None:
    """Compare results.tsv, csv, the page's table, `show` and the summary with the row."""
    cells = row.cells
    same = {"status": row.verdict, "run": f"{row.number:04d}", "parent": row.parent and f"{row.parent:04d}"}
    for name in (*COLUMNS, *row.environment_scores):
        value = (cells | same)[name]
        assert tsv[name] == (f"{value:.6g}" if isinstance(value, float) else str("" if value is None else value)), name
    assert {name: table[name] for name in cells} == {name: cell(value) for name, value in cells.items()}
    names = ("verdict", "now", "eval_score", "total_seconds", "effect_at_decision", "p_helps")
    assert {name: body[name] for name in names} == {name: getattr(row, name) for name in names}
    assert msgspec.convert(shown(ledger, record, row)["row"], Row) == row
    p_helps = "" if row.p_helps is None else f"{math.floor(1e4 * row.p_helps) / 1e4:.4f}"
    wanted = {"verdict": row.verdict, "why": row.why, "p_helps": p_helps}
    wanted |= {"effect_at_decision": formatted(row.effect_at_decision, "+.6f")}
    for lines in (summary(record).splitlines(), list(experiment_lines(record, row, Path("runs")))):
        printed = dict(line.split(":", 1) for line in lines if ":" in line)
        assert {name: printed.get(name, "").strip() for name in wanted} == wanted
        assert all(value.strip() for value in printed.values())
    assert printed.get("now", "").strip() == row.now
    assert f"    verdict:                {row.verdict}" in [*all_lines(plain_json(shown(ledger, record, row)), "0001")]
    assert row.effect is None or f"P(it helps) {percent(row.effect.p_helps)}" in row.why
    for name in ("eval_score", "eval_stderr", "strict_score", *row.environment_scores):
        assert printed.get(name, "").strip() == formatted(cells[name], ".6f")


def formatted(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def test_experiments_are_counted_one_way(seen: Seen) -> None:
    counts = Counts.of(seen.rows)
    line = "10 experiments: 1 baseline, 3 keep, 2 discard, 1 crash, 2 re-run, 1 interrupted; "
    assert str(counts) == f"{line}their changes now: 1 replaced, 1 kept later, 1 kept, 1 reverted"
    assert seen.status.counted == counts
    assert f"results:     {counts}" in seen.status.lines()
    assert str(counts) in markdown.summary(seen.view)
    data = Page(seen.page).data["rows"]
    for verdict, number in counts.verdict.items():
        assert f'data-verdict="{verdict}" aria-pressed="false">{verdict} <small>{number}</small>' in seen.page
        assert [row["verdict"] for row in data].count(verdict) == number
    assert [row["failure"] for row in data if row["verdict"] == "crash"] == ["config"]


# One answer to what the incumbent is: after a git command of the user's, in a real checkout


class Told:
    """What each view tells of the incumbent. `names`: of the kept changes. `rates`: learning rates of the incumbent's
    train.toml. `nows`: what became of experiment 2."""

    def __init__(self, controller: Controller) -> None:
        root = controller.bench.root
        ledger = Ledger(root)
        self.status, self.history, self.page = Status.of(ledger, NOW), of_last_campaign(ledger), gather(ledger, None)
        _, incumbent = compare.find("incumbent", ledger)
        story = Story.of(ledger, None)
        table = list(csv.DictReader(io.StringIO(as_csv(story).decode())))
        self.names = [
            [change.name for change in self.status.incumbent.kept],
            sorted(line.partition("  ")[0] for line in self.history.kept),
            sorted(change.name for change, _ in self.page.story.campaign.effects),
        ]
        self.rates = [incumbent.get(LR), story.campaign.configs[1].get(LR)]
        self.nows = [self.history.runs[1].now, table[1]["now"], self.page.experiments[1].row.now]
        self.standings = [self.status.incumbent.standing, self.page.standing]


OUT, EDITED = ([], 6e-7, "reverted"), (["commit"], 1e-6, "replaced")


@pytest.mark.parametrize(
    ("command", "answer"), [(("revert", "--no-edit", "HEAD"), OUT), (("commit", "--all", "-m", "mine"), EDITED)]
)
def test_every_view_has_one_answer_after_a_git_command_of_the_users(checkout, monkeypatch, command, answer):
    controller = make_poor(checkout, quick(ARITHMETIC_TRL), monkeypatch)
    controller.run(Request())
    keep(controller)
    if answer is EDITED:
        write(controller, "1e-6")
    git(checkout, *command)
    names = [name.replace("commit", f"commit {git(checkout, 'rev-parse', 'HEAD')[:7]}") for name in answer[0]]
    campaign = controller.campaign()
    source = campaign.compose(campaign.kept).source
    prompt = compose(Context(3, source, campaign, controller.bench.rules, controller.ledger, ()))
    told = Told(controller)
    assert told.names == [names] * 3
    assert told.rates == [parse(source).get(LR)] * 2 == [answer[1]] * 2
    assert told.nows == [answer[2]] * 3
    assert told.standings == [campaign.standing] * 2
    assert [change.name for change in campaign.kept] == names
    assert all(f"\n| {clean(line)}\n" in prompt for line in kept_changes(campaign))
    assert told.history.kept == tuple(kept_changes(campaign))
    write(controller, "1e-7")
    against = "against:  the baseline" + (f" with {', '.join(names)}" if names else "")
    assert against in plan(Request(), controller)
