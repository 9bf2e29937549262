"""What `nightshift history` and `nightshift show` say."""

from __future__ import annotations

from nightshift.agents.history import KeyHistory, Span, of_last_campaign
from nightshift.campaign.index import fold_sound
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Record
from nightshift.report.experiment_view import Experiment, Outcome, told
from nightshift.report.views import Part, View


class Trial(Part, kw_only=True):
    """What one experiment did to one key; values as train.toml spells them, `-` where the key did not apply. `others`:
    what changed with it."""

    number: int
    before: str
    after: str
    outcome: Outcome
    expected: float | None
    expected_stderr: float | None
    others: tuple[str, ...]
    is_near_miss: bool


class Key(Part, kw_only=True):
    """Everything tried with one key; `now`: the incumbent's value; `covered`: between two that were rejected."""

    key: str
    now: str
    is_dead_end: bool
    covered: tuple[Span, ...]
    trials: tuple[Trial, ...]


class History(View, kw_only=True, tag="history"):
    """Of the last campaign: its decided experiments, in their order, and what was tried by key."""

    branch: str
    rules: str
    experiments: tuple[Experiment, ...]
    keys: tuple[Key, ...]
    untried_keys: tuple[str, ...]
    damaged: tuple[str, ...]


class Show(View, kw_only=True, tag="show"):
    """One experiment; `record`: its record.json, with a version of its own; `files`: its folder."""

    experiment: Experiment
    record: Record
    files: str


def history(ledger: Ledger) -> History:
    """UsageError before the baseline."""
    memory = of_last_campaign(ledger)
    experiments = told(memory.campaign.decided, memory.campaign)
    outcomes = {each.number: each.outcome for each in experiments}
    first = memory.campaign.decided[0]
    return History(
        branch=first.branch,
        rules=first.rules_hash,
        experiments=experiments,
        keys=tuple(_key(each, outcomes) for each in memory.histories),
        untried_keys=memory.untried_keys,
        damaged=memory.damaged,
    )


def _key(found: KeyHistory, outcomes: dict[int, Outcome]) -> Key:
    trials = tuple(
        Trial(
            number=trial.number,
            before=trial.before,
            after=trial.after,
            outcome=outcomes[trial.number],
            expected=trial.expected and trial.expected.mean,
            expected_stderr=trial.expected and trial.expected.stderr,
            others=trial.others,
            is_near_miss=trial.is_near_miss,
        )
        for trial in found.trials
    )
    return Key(key=found.key, now=found.now, is_dead_end=found.is_dead_end, covered=found.covered, trials=trials)


def show(ledger: Ledger, number: int) -> Show:
    """EngineError where there is none."""
    record = ledger.record(number)
    campaign, _ = fold_sound(ledger, ledger.readable()[0], record.branch, record.rules_hash)
    files = ledger.run_dir(number).relative_to(ledger.runs_dir.parent).as_posix()
    return Show(experiment=told([record], campaign)[0], record=record, files=files)
