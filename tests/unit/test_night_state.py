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
from nightshift.night.observers import event_of, experiment_line, next_stop, summary
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
    crashes, lost = ([crash(records[-1], failure)] * 5 for failure in (Failure.CONFIG, Failure.INFRASTRUCTURE))
    cut = crash(records[-1], Failure.INTERRUPTED)
    assert desk_of([*records, *crashes[1:], cut]).stop_rule() is None
    stop = desk_of([*records, *crashes]).stop_rule()
    assert (stop.cause, stop.is_planned) == ("5 crashes in a row, the last one: config it was", False)
    assert desk_of([*records, *lost[1:], cut], experiments=6).stop_rule() is None
    assert desk_of([*records, *lost]).stop_rule().cause.startswith("5 crashes in a row")
    assert desk_of([*records, *lost], num_slots=2).stop_rule() is None, "runs may be lost together"
    assert states.num_since_keep([*records, cut, *lost]) == 3


def test_a_keep_and_the_second_crash_of_one_cause_are_told(records: list[Record]) -> None:
    def crashed(why: str, after: int) -> Record:
        started = (NOW + timedelta(hours=after)).isoformat()
        made = crash(replace(records[-1], number=10 + after, started=started), Failure.CONFIG)
        return replace(made, judgement=Judgement(why=why))

    baseline, keep, *discards = records
    assert event_of(keep, records) == "keep"
    assert [event_of(record, records) for record in (baseline, *discards)] == [None] * 4
    row = [crashed("loss is nan at step 12", 1), crashed("loss is nan at step 7", 2), crashed("loss is nan", 3)]
    assert [event_of(record, [*records, *row[: n + 1]]) for n, record in enumerate(row[:2])] == [None, "repeated crash"]
    third = crashed("loss is nan at step 9", 3)
    assert event_of(third, [*records, *row[:2], third]) is None  # once is enough
    assert event_of(row[2], [*records, row[0], row[2]]) is None  # another cause


def test_the_state_survives_its_file_and_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert states.load(ledger) is None
    change = Change(keys={"trainer.optim.lr": "1e-6"})
    pending = (Answer(b"lr = 1\n", Proposal(description="why", notes=("a note",)), number=2, change=change),)
    state = replace(state_of(hours=8.0, gpus="2,3"), pending=pending)
    states.save(ledger, state)
    assert states.load(ledger) == state
    for damage in (b"", b'{"version": 99}'):
        (tmp_path / "runs" / states.NIGHT_NAME).write_bytes(damage)
        with pytest.raises(UsageError, match=r"night\.json is damaged: .*\. Delete it"):
            states.load(ledger)


def test_the_summary_says_what_happened_and_what_comes_next(tmp_path: Path, records: list[Record]) -> None:
    cut = replace(crash(records[-1], Failure.INTERRUPTED), judgement=Judgement(why="bad\x1b[2J\ncause"))
    assert experiment_line(cut).startswith("0005 trainer.optim.lr 3e-6 -> 1e-6: measured 55.0 %, interrupted: bad")
    campaign_now = Campaign.of([*records, cut], BRANCH, "rules")
    state = replace(state_of(hours=8.0, experiments=20), cause="5 experiments are done")
    text = next_stop(state, records, NOW + timedelta(hours=2))
    assert text.endswith("(in 6.0 h), or after 15 more experiments, or when you create the file STOP or press Ctrl-C")
    over = summary(state, Ledger(tmp_path), campaign_now, NOW)
    assert f"incumbent:        {standing_text(campaign_now.standing, campaign_now.kept)}\n" in over
    assert "\nkept:             confirmed (P(it helps) > 95 %): 0002; unconfirmed: none\n" in over
    assert "\nstopped:          5 experiments are done\n" in over
    steps = [*next_steps(Ledger(tmp_path), campaign_now, state)]
    assert [command for _, command in steps] == [
        *("uv run nightshift diff baseline incumbent", "uv run run.py --baseline", "uv run nightshift certify"),
        *("uv run nightshift night --agent tpe --hours 8", "uv run nightshift export --to model"),
    ]
    assert over.splitlines()[-5:] == [f"next:             {sentence} {command}" for sentence, command in steps]
    assert len(over.splitlines()) <= 20
