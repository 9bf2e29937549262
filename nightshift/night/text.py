"""A night in words: the summary after every experiment, and what `nightshift status` says of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import Ledger
from nightshift.night.state import STOP_NAME, NightState, decided, is_running, load, num_since_keep
from nightshift.proposers.history import clean
from nightshift.records import Record

SUMMARY_NAME = "night.txt"
_NUM_SHOWN = 5
_MAX_DESCRIPTION = 160


def summary(state: NightState, own: Sequence[Record], campaign: Campaign, now: datetime) -> str:
    """The night in at most twenty lines of plain text."""
    counted = decided(own)
    judged = [r for r in counted if r.parent is not None or r.status == "crash"]
    counts = {status: sum(r.status == status for r in judged) for status in ("keep", "discard", "crash")}
    back = sum(r in judged for r in campaign.taken_back)
    lost = len(own) - len(counted)
    hours = (now - datetime.fromisoformat(state.started)).total_seconds() / 3600
    lines = [
        f"night:        {state.request.agent} on {state.branch}",
        f"since:        {_local(state.started)} ({hours:.1f} h)",
        f"experiments:  {len(counted)}{' with the baseline' if len(judged) < len(counted) else ''}: "
        f"{counts['keep']} kept{f' ({back} taken back)' if back else ''}, {counts['discard']} discarded, "
        f"{counts['crash']} crashed" + (f"; {lost} more interrupted or failed by machinery" if lost else ""),
    ]
    if campaign.incumbent is not None and campaign.standing is not None:
        lines.append(
            f"best:         {campaign.incumbent.number:04d}, expected score {campaign.standing.incumbent:.4f} "
            f"(baseline {_score(campaign.kept[0])})  {clean(campaign.incumbent.description, _MAX_DESCRIPTION)}"
        )
    lines.append(
        f"stopped:      {clean(state.cause, 400)}" if state.cause else f"next stop:    {next_stop(state, own, now)}"
    )
    kept = [r for r in own if r.status == "keep" and r.parent is not None]
    for title, shown in (("kept:", kept[-_NUM_SHOWN:]), ("last:", own[-_NUM_SHOWN:])):
        if shown:
            lines += [title, *(f"  {one_line(r)}" for r in shown)]
    return "\n".join(lines)


def one_line(record: Record) -> str:
    """Number, verdict, difference, description."""
    judgement = record.judgement
    delta = "" if judgement is None or judgement.delta is None else f"{100 * judgement.delta:+.1f} pp"
    # A crash that decided nothing is called by its reason.
    verdict = record.failure if record.failure and record.decided is None else record.status
    return f"{record.number:04d} {verdict:12}{delta:9}{clean(record.description, _MAX_DESCRIPTION)}"


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
    """For `nightshift status`: what the night does and when it stops; nothing where there was no night."""
    state = load(ledger)
    if state is None:
        return []
    own = state.own(records)
    if is_running(ledger, state):
        doing = "starting"
        if state.doing:
            seconds = (now - datetime.fromisoformat(state.doing_since)).total_seconds()
            doing = f"{clean(state.doing, _MAX_DESCRIPTION)}, for {seconds:.0f} s"
        return [
            f"night:    {state.request.agent} since {_local(state.started)}, {len(decided(own))} experiments; {doing}",
            f"stops:    {next_stop(state, own, now)}",
        ]
    if state.cause is None:
        return [f"night:    {state.request.agent} was cut off: the same command goes on with it"]
    return [f"night:    {state.request.agent} is over: {clean(state.cause, 400)}"]


def _score(record: Record) -> str:
    return "not measured" if record.score is None else f"{record.score:.4f}"


def _local(moment: str) -> str:
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M")
