"""What `nightshift status` says: what runs, what the last campaign holds, what the night does."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import psutil

from nightshift.campaign.cost import campaign_cost
from nightshift.campaign.index import fold_sound, last_campaign
from nightshift.campaign.ledger import STARTED, Ledger, read_progress
from nightshift.campaign.records import Cost, Progress, Record
from nightshift.campaign.standing import Counts
from nightshift.executors.slurm import jobs_left
from nightshift.night.state import NightState, decided, load
from nightshift.night.summary import next_stop
from nightshift.report.experiment_view import Experiment, told
from nightshift.report.views import Part, View


class Running(Part, kw_only=True):
    """An experiment in flight, and how far its run is; null where the run has not begun."""

    number: int
    since: str
    seconds: float
    description: str
    progress: Progress | None


class Night(Part, kw_only=True):
    """The last night. `state`: it is running, over (by its `cause`), or was cut off; `left`: the jobs in SLURM that it
    submitted and did not collect, by experiment; `num_experiments`: how many of its own are decided."""

    agent: str
    branch: str
    since: str
    num_experiments: int
    state: Literal["running", "over", "cut off"]
    cause: str | None
    next_stop: str | None
    left: dict[str, str]


class Status(View, kw_only=True, tag="status"):
    """`branch` and `rules` are the last campaign's, and so are `counted` and `incumbent`; `incumbent_score` and
    `baseline_score` are what is believed of the two, and an earlier train.toml comes back where it is believed better
    by `take_back`. `cost`: with the proposals that nights refused. `others`: experiments of other campaigns in
    runs/. `damaged`: what could not be read or fits nothing. `chain`: its head."""

    is_running: bool
    running: tuple[Running, ...]
    branch: str | None
    rules: str | None
    counted: Counts
    cost: Cost
    others: int
    incumbent: Experiment | None
    incumbent_score: float | None
    baseline_score: float | None
    take_back: float | None
    difference_interval: tuple[float, float] | None
    night: Night | None
    chain: str
    damaged: tuple[str, ...]


def status(ledger: Ledger, now: datetime) -> Status:
    """As of `now`, aware."""
    records, damaged = ledger.readable()
    whose = last_campaign(records)
    campaign, unfit = fold_sound(ledger, records, *whose)
    ours = [record for record in records if whose in (("", ""), (record.branch, record.rules_hash))]
    sound = [record for record in ours if record.number not in unfit]  # as the page counts
    incumbent, standing, is_running = campaign.incumbent, campaign.standing, ledger.is_running()
    started = [record for record in records if record.status == STARTED] if is_running else []
    return Status(
        is_running=is_running,
        running=tuple(_running(ledger, record, now) for record in started),
        branch=whose[0] or None,
        rules=whose[1] or None,
        counted=Counts.of(sound, {record.number for record in campaign.taken_back}),
        cost=campaign_cost(ledger.runs_dir, sound),
        others=len(records) - len(ours),
        incumbent=told([incumbent], campaign)[0] if incumbent else None,
        incumbent_score=standing.incumbent if standing else None,
        baseline_score=standing.baseline if standing else None,
        take_back=incumbent.decision.take_back if incumbent else None,
        difference_interval=standing.difference_interval if standing else None,
        night=_night(ledger, records, is_running, now),
        chain=ledger.journal.head,
        damaged=(*damaged, *unfit.values()),
    )


def _running(ledger: Ledger, record: Record, now: datetime) -> Running:
    return Running(
        number=record.number,
        since=record.started,
        seconds=(now - datetime.fromisoformat(record.started)).total_seconds(),
        description=record.description,
        progress=read_progress(ledger.run_dir(record.number)),
    )


def _night(ledger: Ledger, records: Sequence[Record], is_running: bool, now: datetime) -> Night | None:
    state: NightState | None = load(ledger)
    if state is None:
        return None
    is_on = state.cause is None and is_running and psutil.pid_exists(state.pid)
    left = jobs_left(ledger, state.first) if state.cause is None and not is_on else {}
    return Night(
        agent=state.request.agent,
        branch=state.branch,
        since=state.started,
        num_experiments=len(decided(state.own(records))),
        state="over" if state.cause is not None else "running" if is_on else "cut off",
        cause=state.cause,
        next_stop=next_stop(state, state.own(records), now) if is_on else None,
        left={folder.name: job.name for folder, job in sorted(left.items())},
    )
