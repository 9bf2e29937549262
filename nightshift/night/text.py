"""A night in words: the summary after every experiment, and what `nightshift status` says of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import psutil

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import Ledger
from nightshift.errors import Interrupted
from nightshift.files import write_atomically
from nightshift.night.state import STOP_NAME, NightState, decided, load, num_since_keep
from nightshift.pools.survivors import alive
from nightshift.records import Record
from nightshift.setup import Setup
from nightshift.text import clean

SUMMARY_NAME = "night.txt"
_NUM_SHOWN = 5
_MAX_DESCRIPTION = 160


def write_summary(state: NightState, setup: Setup) -> str:
    """The night's summary, written beside the morning page."""
    from nightshift.report.page import write_report  # jinja2 and matplotlib load with the first page

    own, campaign = state.own(setup.ledger.records()), setup.campaign(state.branch)
    text = summary(state, own, campaign, setup.now(), setup.ledger.chain.head)
    write_atomically(setup.ledger.runs_dir / SUMMARY_NAME, text.encode() + b"\n")
    try:
        write_report(setup.root, setup.now(), branch=state.branch)
    except Interrupted:
        raise
    except Exception as error:  # whatever it is, a page that cannot be written does not end the night
        setup.reporter.note(f"the page cannot be written: {type(error).__name__}: {error}")
    return text


def summary(state: NightState, own: Sequence[Record], campaign: Campaign, now: datetime, chain: str) -> str:
    """The night in a dozen lines of plain text. `chain`: its head."""
    counted = decided(own)
    judged = [r for r in counted if r.parent is not None or r.status == "crash"]
    counts = {status: sum(r.status == status for r in judged) for status in ("keep", "discard", "crash")}
    lost = len(own) - len(counted)
    hours = (now - datetime.fromisoformat(state.started)).total_seconds() / 3600
    lines = [
        f"night:        {state.request.agent} on {state.branch}",
        f"since:        {_local(state.started)} ({hours:.1f} h)",
        f"experiments:  {len(counted)}{' with the baseline' if len(judged) < len(counted) else ''}: "
        f"{counts['keep']} kept, {counts['discard']} discarded, {counts['crash']} crashed"
        + (f"; {lost} more interrupted or failed by machinery" if lost else ""),
    ]
    if campaign.incumbent is not None and campaign.standing is not None:
        lines.append(
            f"best:         {campaign.incumbent.number:04d}, expected score {campaign.standing.incumbent:.4f} "
            f"(baseline {campaign.standing.baseline:.4f})  {clean(campaign.incumbent.description, _MAX_DESCRIPTION)}"
        )
    lines.append(
        f"stopped:      {clean(state.cause, 400)}" if state.cause else f"next stop:    {next_stop(state, own, now)}"
    )
    return "\n".join([*lines, f"chain:        {chain}", *map(one_line, own[-_NUM_SHOWN:])])


def one_line(record: Record) -> str:
    """Number, verdict, difference, description."""
    judgement = record.judgement
    delta = "" if judgement is None or judgement.delta is None else f"{100 * judgement.delta:+.1f} pp"
    # A crash that decided nothing is called by its reason.
    verdict = record.failure if record.failure and record.decided is None else record.status
    return f"  {record.number:04d} {verdict:12}{delta:9}{clean(record.description, _MAX_DESCRIPTION)}"


def next_stop(state: NightState, own: Sequence[Record], now: datetime) -> str:
    """Which stop rule comes next, as far as it can be foreseen."""
    asked, parts = state.request, list[str]()
    if state.deadline is not None:
        left = max((state.deadline - now).total_seconds(), 0) / 3600
        parts.append(f"{_local(state.deadline.isoformat())} (in {left:.1f} h)")
    if asked.experiments is not None:
        parts.append(f"after {max(asked.experiments - len(decided(own)), 0)} more experiments")
    if asked.plateau is not None:
        parts.append(f"after {max(asked.plateau + 1 - num_since_keep(own), 0)} more without a keep")
    return ", or ".join([*parts, f"file {STOP_NAME}, or Ctrl-C"])


def status_lines(ledger: Ledger, records: Sequence[Record], now: datetime) -> list[str]:
    """For `nightshift status`: how far the night is and when it stops; nothing where there was no night."""
    state = load(ledger)
    if state is None:
        return []
    agent, own = state.request.agent, state.own(records)
    if state.cause is not None:
        return [f"night:    {agent} is over: {clean(state.cause, 400)}"]
    if not (ledger.is_running() and psutil.pid_exists(state.pid)):
        left = [
            f"left:     {number:04d} outlived its head: {', '.join(workers)}"
            for number, workers in sorted(alive(ledger, state.first).items())
        ]
        how = " and adopts what still runs; nightshift night --stop ends it" if left else ""
        return [*left, f"night:    {agent} was cut off: the same command goes on with it{how}"]
    told = f"{agent} since {_local(state.started)}, {len(decided(own))} experiments"
    return [f"night:    {told}", f"stops:    {next_stop(state, own, now)}"]


def _local(moment: str) -> str:
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M")
