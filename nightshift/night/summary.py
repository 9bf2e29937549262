"""A night in words: the summary after every experiment."""

from collections.abc import Callable, Sequence
from datetime import datetime

from nightshift.agents.notebook import notebook
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.cost import runs_cost
from nightshift.campaign.finish import uncommitted
from nightshift.campaign.posterior import next_stage
from nightshift.campaign.records import (
    BLOCK_NAME,
    NO_SANDBOX,
    NOT_ISOLATED,
    NOTEBOOK_NAME,
    NOTHING,
    SIDES,
    Comparison,
    Cost,
    Record,
    Stage,
)
from nightshift.campaign.results import Counts, Row, last_scores, standing_text
from nightshift.errors import EngineError, Interrupted
from nightshift.experiment.estimate import p_value
from nightshift.experiment.experiment import Controller
from nightshift.files import write_atomically
from nightshift.night.desk import Desk, Event, Kind
from nightshift.night.state import STOP_NAME, NightState, decided, night_cost, num_since_keep
from nightshift.text import clean, local

_NUM_SHOWN = 5
_MAX_DESCRIPTION = 160


def write_summary(state: NightState, controller: Controller) -> str:
    """Write the night's summary, and the page beside it. Returns the summary. UsageError if runs/ was moved away."""
    from nightshift.report.page import write_report

    controller.ledger.require_in_place()
    records = controller.ledger.records()
    campaign = Campaign.read(controller.ledger, records, state.branch, state.rules_hash)
    cost = night_cost(state, controller.ledger) + runs_cost(state.own(records))
    text = summary(state, records, campaign, controller.now(), cost)
    write_atomically(controller.ledger.runs_dir / BLOCK_NAME, text.encode() + b"\n")
    write_atomically(controller.ledger.runs_dir / NOTEBOOK_NAME, notebook(campaign).encode())
    try:
        write_report(controller.bench.root, controller.now(), branch=state.branch, is_live=state.cause is None)
    except Interrupted:
        raise
    except Exception as error:  # whatever it is, a page that cannot be written does not end the night
        controller.reporter.note(f"the page cannot be written: {type(error).__name__}: {error}")
    return text


class Page:
    """An observer that writes the summary and the page, and prints the summary after an experiment."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._has_news, self._has_verdict = tell, False, False

    def __call__(self, desk: Desk, event: Event) -> None:
        """Write when nothing else is left to do: a page takes a second."""
        self._has_verdict |= event.kind in (Kind.CLOSED, Kind.STOPPED)
        self._has_news |= event.kind is Kind.WAITING or self._has_verdict
        if event.kind is Kind.STOPPED or (event.kind is Kind.IDLE and self._has_news):
            try:
                text = write_summary(desk.state, desk.controller)
                if self._has_verdict:
                    self._tell(text)
            except (EngineError, OSError) as error:
                desk.note(f"the summary cannot be written: {error}")
            self._has_news = self._has_verdict = False


def summary(
    state: NightState, records: Sequence[Record], campaign: Campaign, now: datetime, cost: Cost = NOTHING
) -> str:
    """Return a dozen lines of plain text. `cost`: of the night's proposals and runs."""
    own = state.own(records)
    table = campaign.rows(own)
    hours = (now - datetime.fromisoformat(state.started)).total_seconds() / 3600
    lines = [
        *([headline] if (headline := state.headline(now)) else []),
        f"night:        {state.request.agent} on {state.branch}",
        f"since:        {local(datetime.fromisoformat(state.started))} ({hours:.1f} h)",
        *([f"agent:        {NOT_ISOLATED}"] if state.sandbox == NO_SANDBOX else []),
        f"counted:      {Counts.of(table)}",
        f"cost:         {cost}",
    ]
    if campaign.standing is not None:
        lines.append(f"incumbent:    {standing_text(campaign.standing, campaign.kept)}")
    if scores := last_scores(own):
        lines.append(f"last runs:    {scores}")
    if missing := uncommitted(records, state.branch):
        lines.append(f"git:          {clean(missing, 500)}")
    lines += [f"git:          {clean(campaign.unread, 500)}"] if campaign.unread else []
    lines += [f"note:         {line}" for line in state.morning(records, now) if line != headline]
    lines += [f"certificate:  {state.certificate}"] if state.certificate else []
    stop = f"stopped:      {clean(state.cause, 400)}" if state.cause else f"next stop:    {next_stop(state, own, now)}"
    lines += [stop, *map(one_line, table[-_NUM_SHOWN:])]
    return "\n".join(lines)


def one_line(row: Row) -> str:
    """Return number, verdict, effect at the decision and hypothesis of an experiment."""
    verdict = f"crash ({row.failure})" if row.failure and row.verdict == "crash" else row.status
    rider = f" (also re-testing {row.rider})" if row.rider else ""
    return f"  {row.number:04d} {verdict:20}{row.effect or ''!s:16}{clean(row.description, _MAX_DESCRIPTION)}{rider}"


def next_stop(state: NightState, own: Sequence[Record], now: datetime) -> str:
    """Say which stop rule comes next, as far as it can be foreseen."""
    request, parts = state.request, list[str]()
    if state.deadline is not None:
        left = max((state.deadline - now).total_seconds(), 0) / 3600
        parts.append(f"{local(state.deadline)} (in {left:.1f} h)")
    if request.experiments is not None:
        num_left = max(request.experiments - len(decided(own)), 0)
        parts.append(f"after {num_left} more experiments")
        if next_stage(request.experiments - 1, 0, 1, request.pairs) is not Stage.SEARCH:
            num_last = 4 if request.pairs == 1 else 2 * request.pairs
            parts[-1] += f" (the last {num_last} of them measure baseline and incumbent)"
    if request.plateau is not None:
        parts.append(f"after {max(request.plateau + 1 - num_since_keep(own), 0)} more without a keep")
    if request.until is not None:
        parts.append(f"when the score is at least {request.until:g} (lower bound of its 95 % interval)")
    if request.max_cost is not None:
        parts.append(f"at ${request.max_cost:,.2f} of the agents' own figures")
    return ", or ".join([*parts, f"file {STOP_NAME}, or Ctrl-C"])


def certified_line(comparison: Comparison) -> str:
    """Say the result of a night in one line: incumbent minus baseline by fresh runs on the test split."""
    result = comparison.estimate
    low, high = (f"{100 * bound:+.1f}" for bound in result.interval)
    runs = f"{min(len(comparison.scores(side)) for side in SIDES)} fresh runs each"
    where = f"{comparison.plan.split} split, {runs}, 95 % interval {low} to {high} pp"
    difference = f"{100 * result.difference:+.1f} pp"
    crashes = f"; {comparison.crashes}" if comparison.crashes else ""
    where = f"{where}, p = {p_value(result):.2g}"
    return f"certified: {comparison.verdict}, {difference} incumbent minus baseline ({where}){crashes}"
