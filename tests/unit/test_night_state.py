"""When a night is over, what it remembers, and how it is told."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from nightshift.agents.base import Answer
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Change, Judgement, Proposal, Record
from nightshift.campaign.results import standing_text
from nightshift.errors import Failure, UsageError
from nightshift.night import state as states
from nightshift.night.observers import event_of, experiment_line, summary
from nightshift.night.state import Desk, NightRequest, NightState
from nightshift.report.sections import next_steps
from tests.campaigns import BRANCH, campaign, replace

NOW = datetime(2026, 11, 21, 22, 0, tzinfo=UTC)


def state_of(**flags: object) -> NightState:
    return NightState(NightRequest("tpe", **flags), "rules", started=NOW.isoformat(), first=1, branch=BRANCH)


def desk_of(records: list[Record], num_slots: int = 1, **flags: object) -> Desk:
    """The desk of a night at NOW, whose runs are expected to take 75 s."""
    bench = SimpleNamespace(executor=SimpleNamespace(num_slots=num_slots), rules=SimpleNamespace(budget_seconds=60.0))
    ledger = SimpleNamespace(records=lambda: records, runs_dir=Path("none"))
    reporter = SimpleNamespace(note=None)
    controller = SimpleNamespace(bench=bench, ledger=ledger, reporter=reporter, now=lambda: NOW, in_flight=())
    return Desk(state_of(**flags), controller)


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    """Baseline, a keep, three discards."""
    return campaign(Ledger(tmp_path), ["3e-6", "1e-5", "2e-6", "1e-6"])


def crash(record: Record, failure: Failure) -> Record:
    """As experiment.py closes it: only a config's own crash is a decision."""
    decided = record.decided if failure is Failure.CONFIG else None
    judgement = Judgement(why=f"{failure} it was")
    return replace(record, status="crash", failure=failure, judgement=judgement, decided=decided)


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ({}, None),
        ({"experiments": 6}, None),
        ({"experiments": 5}, "5 experiments are done"),
        ({"plateau": 4}, None),
        ({"plateau": 3}, "plateau: nothing kept in 3 experiments"),
        ({"hours": 1.0}, None),
        ({"hours": 0.02}, "0.02 hours are over, or too short for another run of 75 s"),
    ],
)
def test_the_stop_rules(records: list[Record], flags: dict[str, object], cause: str | None) -> None:
    stop = desk_of(records, **flags).stop_rule()
    assert (stop is None) == (cause is None)
    assert stop is None or (stop.cause.startswith(str(cause)) and stop.is_planned)


def test_a_score_ends_the_night_once_the_lower_bound_reaches_it(records: list[Record]) -> None:
    standing = records[-1].judgement.standing
    bound = standing.incumbent - 1.96 * standing.incumbent_sd
    for until, is_over in ((bound + 0.001, False), (bound - 0.001, True), (standing.incumbent, False)):
        stop = desk_of(records, until=until).stop_rule()
        assert (stop is not None) == is_over
    stop = desk_of(records, until=0.1).stop_rule()
    assert stop.is_planned
    assert stop.cause == f"--until 0.1: the incumbent's score is at least {bound:.4f} (95 % interval)"
    assert desk_of([], until=0.1).stop_rule() is None


@pytest.mark.parametrize(("num_slots", "num_waves"), [(1, 6), (2, 3), (4, 2)])
def test_a_night_reserves_the_time_of_its_certificate_in_all_slots(records, num_slots, num_waves) -> None:
    for seconds, num_left in ((75 * (num_waves + 1) + 1, num_slots), (75 * (num_waves + 1) - 1, 0)):
        desk = desk_of(records, num_slots, hours=seconds / 3600, certify=3)
        assert desk.runs_left() == num_left
        assert (desk.stop_rule() is None) == (num_left > 0)


def test_five_crashes_in_a_row_are_no_plan(records: list[Record]) -> None:
    lost = [crash(records[-1], Failure.CONFIG)] * 5
    assert desk_of([*records, *lost[1:]]).stop_rule() is None
    stop = desk_of([*records, *lost]).stop_rule()
    assert (stop.cause, stop.is_planned) == ("5 crashes in a row, the last one: config it was", False)
    early = replace(lost[0], number=9, started=(NOW - timedelta(days=9)).isoformat(), status="keep", failure=None)
    stop = desk_of([*records, *lost, early]).stop_rule()  # it ended before the others
    assert stop.cause == "5 crashes in a row, the last one: config it was"


def test_what_was_interrupted_or_broke_counts_as_nothing_decided(records: list[Record]) -> None:
    lost = [crash(r, f) for r in records[-1:] for f in (Failure.INTERRUPTED, Failure.INFRASTRUCTURE)]
    assert desk_of([*records, *lost], experiments=6).stop_rule() is None
    assert states.num_since_keep([*records, *lost]) == 3
    assert desk_of([*records, *lost * 4]).stop_rule() is None
    assert desk_of([*records, *lost * 5]).stop_rule().cause.startswith("5 crashes in a row")


def test_a_keep_and_the_second_crash_of_one_cause_are_told(records: list[Record]) -> None:
    def crashed(why: str, after: int, failure: Failure = Failure.CONFIG) -> Record:
        started = (NOW + timedelta(hours=after)).isoformat()
        made = crash(replace(records[-1], number=10 + after, started=started), failure)
        return replace(made, judgement=Judgement(why=why))

    baseline, keep, *discards = records
    assert event_of(keep, records) == "keep"
    assert [event_of(record, records) for record in (baseline, *discards)] == [None] * 4
    row = [crashed("loss is nan at step 12", 1), crashed("loss is nan at step 7", 2), crashed("loss is nan", 3)]
    assert [event_of(record, [*records, *row[: n + 1]]) for n, record in enumerate(row[:2])] == [None, "repeated crash"]
    third = crashed("loss is nan at step 9", 3)
    assert event_of(third, [*records, *row[:2], third]) is None  # once is enough
    assert event_of(row[2], [*records, row[0], row[2]]) is None  # another cause
    paused = crashed("stopped", 2, Failure.INTERRUPTED)
    again = crashed("loss is nan at step 99", 4)
    assert event_of(again, [*records, row[0], paused, again]) == "repeated crash"
    assert event_of(paused, [*records, row[0], paused]) is None


def test_a_night_counts_its_own_experiments_only(records: list[Record]) -> None:
    state = replace(state_of(), first=3)
    elsewhere = [replace(records[-1], branch="autoresearch/other"), replace(records[-1], rules_hash="other")]
    started = replace(records[-1], status="started")
    assert [r.number for r in state.closed([*records, *elsewhere, started])] == [3, 4, 5]


def test_the_state_survives_its_file_and_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert states.load(ledger) is None
    proposal = Proposal(description="why", prediction="+1 pp", notes=("a note",))
    change = Change(keys={"trainer.optim.lr": "1e-6"})
    pending = (Answer(b"lr = 1\n", proposal, number=2, change=change), Answer(b"lr = 2\n", change=change))
    state = replace(state_of(hours=8.0, gpus="2,3"), pending=pending, refusals=("no edit", "locked"))
    states.save(ledger, state)
    assert states.load(ledger) == state
    path = tmp_path / "runs" / states.NIGHT_NAME
    for damage in (b"", b"{", b"[]", b'{"version": 1}', b'{"version": 99}'):
        path.write_bytes(damage)
        with pytest.raises(UsageError, match=r"night\.json is damaged: .*\. Delete it"):
            states.load(ledger)


def test_the_summary_says_what_happened_and_what_comes_next(tmp_path: Path, records: list[Record]) -> None:
    campaign_now = Campaign.of(records, BRANCH, "rules")
    cut = replace(crash(records[-1], Failure.INTERRUPTED), judgement=Judgement(why="bad\x1b[2J\ncause"))
    assert experiment_line(cut).endswith(" lr 3e-6 -> 1e-6: measured 55.0 %, interrupted: bad cause")
    own = [*records, cut]
    text = summary(state_of(hours=8.0, experiments=20), own, campaign_now, NOW + timedelta(hours=2))
    assert f"incumbent:        {standing_text(campaign_now.standing, campaign_now.kept)}\n" in text
    assert "(in 6.0 h), or after 15 more experiments (the last 4 of them measure baseline and incumbent), or " in text
    assert len(text.splitlines()) <= 20
    over = summary(replace(state_of(), cause="5 experiments are done"), own, campaign_now, NOW)
    assert "stopped:          5 experiments are done" in over
    steps = [*next_steps(campaign_now, "tpe", is_certified=False)]
    assert [command for _, command in steps] == [
        *("uv run nightshift diff baseline incumbent", "uv run nightshift certify"),
        *("uv run nightshift night --agent tpe --hours 8", "uv run nightshift export --to model"),
    ]
    assert over.splitlines()[-4:] == [f"next:             {sentence} {command}" for sentence, command in steps]
    certified = summary(replace(state_of(), cause="over"), own, campaign_now, NOW, is_certified=True)
    assert "certify" not in certified


def test_what_is_in_a_row_is_so_in_the_order_of_decisions(records: list[Record]) -> None:
    """Side by side the second may end last."""
    assert [record.is_keep for record in records] == [True, True, False, False, False]
    late = [records[0], replace(records[1], decided=5), *(replace(r, decided=r.number - 1) for r in records[2:])]
    assert states.num_since_keep(late) == 0
    assert states.num_since_keep(records) == 3
    repeat = [replace(r, status="measured") for r in records[2:]]
    assert states.num_since_keep([*records[:2], *repeat]) == 0, "a repeat tries nothing"
