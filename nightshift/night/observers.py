"""The observers of a night: a line per experiment, summary and page, notifications, and the tag.

`nightshift night --notify COMMAND` runs the command with one JSON object on stdin. A notification can neither stop nor
delay a night. The command is not stored: pass --notify again to resume.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from subprocess import TimeoutExpired
from typing import Any

from msgspec.structs import asdict

from nightshift.agents.availability import AWAY
from nightshift.agents.notebook import notebook
from nightshift.agents.presets import program_words
from nightshift.campaign.campaign import Campaign, uncommitted
from nightshift.campaign.commits import short_key
from nightshift.campaign.ledger import runs_cost
from nightshift.campaign.posterior import next_stage
from nightshift.campaign.records import (
    BLOCK_NAME,
    NO_SANDBOX,
    NOT_ISOLATED,
    NOTEBOOK_NAME,
    NOTHING,
    PAGE_NAME,
    SIDES,
    Comparison,
    Cost,
    Record,
    Stage,
    Verdict,
    percent,
)
from nightshift.campaign.results import Counts, decisions_text, last_scores, results_tsv, standing_text, verdict_of
from nightshift.campaign.results import row as row_of
from nightshift.campaign.waits import LONG_SECONDS
from nightshift.config.train_toml import UNSET, changes_of
from nightshift.errors import EngineError, Interrupted, NightshiftError, UsageError
from nightshift.executors.process import MARKER_NAME, ProcessTree, new_marker
from nightshift.experiment.certify import p_value
from nightshift.experiment.experiment import Controller
from nightshift.files import as_json, write_atomically
from nightshift.night.state import STOP_NAME, Desk, Event, Kind, NightState, by_end, decided, night_cost, num_since_keep
from nightshift.report.sections import has_certificate, next_steps
from nightshift.text import clean, counted, local
from nightshift.waiting import lasted, waiting

KEEP, REPEATED_CRASH, AGENT, PAUSED, END = "keep", "repeated crash", "agent unavailable", "paused", "end"
MESSAGE_VERSION = 2
_GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL
_MAX_CHANGE = 160


def write_summary(state: NightState, controller: Controller) -> str:
    """Write the night's summary, notebook and page. Returns the summary. Raises UsageError if runs/ was moved."""
    from nightshift.report.page import write_report

    controller.ledger.require_in_place()
    records = controller.ledger.records()
    campaign = Campaign.read(controller.ledger, records, state.branch, state.rules_hash)
    cost = night_cost(state, controller.ledger) + runs_cost(state.closed(records))
    is_certified = has_certificate(controller.ledger, campaign)
    text = summary(state, records, campaign, controller.now(), cost, is_certified=is_certified)
    write_atomically(controller.ledger.runs_dir / BLOCK_NAME, text.encode() + b"\n")
    write_atomically(controller.ledger.runs_dir / NOTEBOOK_NAME, notebook(campaign).encode())
    try:
        write_report(controller.bench.root, controller.now(), branch=state.branch, is_live=state.cause is None)
    except Interrupted:
        raise
    except Exception as error:  # a bug of the page must not end the night
        controller.reporter.note(f"the page cannot be written: {type(error).__name__}: {error}")
    return text


class Page:
    """An observer that prints a line per experiment, writes summary and page, and prints the final summary."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._news = tell, set[Kind]()

    def __call__(self, desk: Desk, event: Event) -> None:
        """Write the page, which needs a second, only if there is nothing else to do."""
        self._news.add(event.kind)
        if event.record is not None:
            self._tell(experiment_line(event.record))
        if event.kind is Kind.STOPPED or (event.kind is Kind.IDLE and self._news & {Kind.CLOSED, Kind.WAITING}):
            try:
                text = write_summary(desk.state, desk.controller)
                if event.kind is Kind.STOPPED:
                    self._tell(text)
            except (EngineError, OSError) as error:
                desk.note(f"the summary cannot be written: {error}")
            self._news.clear()


def summary(
    state: NightState,
    records: Sequence[Record],
    campaign: Campaign,
    now: datetime,
    cost: Cost = NOTHING,
    *,
    is_certified: bool = False,
) -> str:
    """Return the summary, a dozen lines. `cost`: of the night's proposals and runs. `is_certified`: the incumbent has a
    certificate."""
    closed = state.closed(records)
    began = datetime.fromisoformat(state.started)
    rows = [
        ("night", f"{state.request.agent} on {state.branch}"),
        ("since", f"{local(began)} ({lasted((now - began).total_seconds())})"),
        ("agent", NOT_ISOLATED if state.sandbox == NO_SANDBOX else ""),
        ("results", str(Counts.of(campaign.rows(closed)))),
        ("cost", str(cost)),
        ("incumbent", standing_text(campaign.standing, campaign.kept) if campaign.standing else ""),
        ("final check runs", last_scores(closed)),
        *(("git", clean(text, 500)) for text in (uncommitted(records, state.branch), campaign.unread) if text),
        *(("note", line) for line in state.morning(records, now)),
        ("certificate", state.certificate),
        ("stopped", clean(state.cause, 400)) if state.cause else ("next stop", next_stop(state, closed, now)),
    ]
    if state.cause is not None:
        rows.append(("page", f"runs/{PAGE_NAME}"))
        steps = next_steps(campaign, state.request.agent, is_certified=is_certified)
        rows += [("next", f"{sentence} {command}") for sentence, command in steps]
    return "\n".join(f"{name + ':':17} {text}" for name, text in rows if text)


def experiment_line(record: Record) -> str:
    """Return a line with number, change, measured score, effect at the decision, verdict and reason."""
    row = row_of(record, {})
    changes = [
        f"{short_key(c.key)} {c.old or UNSET} -> {c.new or UNSET}" for c in changes_of(row.changes) if c.old != c.new
    ]
    change = clean(", ".join(changes) or f"the baseline{''.join(f' + {name}' for name in row.kept)}", _MAX_CHANGE)
    figures = [] if row.eval_score is None else [f"measured {100 * row.eval_score:.1f} %"]
    figures += [f"effect {row.effect}"] if row.effect else []
    why = row.why
    if row.verdict == "re-run":
        why = "no new change" if record.run.stage is Stage.SEARCH else "a final check run, no new change"
    keep_at = record.decision_rules.keep_at
    if row.p_helps is not None and (row.p_helps >= keep_at) == (row.verdict == "keep"):
        why = f"P(it helps) {percent(row.p_helps)}"
    verdict = f"crash ({row.failure})" if row.failure and row.verdict == "crash" else row.status
    others = f"; {decisions_text(record.moved)}" if record.moved else ""
    return (
        f"{row.number:04d} {change}{record.run.with_rider}: {', '.join([*figures, verdict])}: {clean(why, 400)}{others}"
    )


def next_stop(state: NightState, closed: Sequence[Record], now: datetime) -> str:
    """Return the stop rules that can be foreseen."""
    request, parts = state.request, list[str]()
    if state.deadline is not None:
        left = max((state.deadline - now).total_seconds(), 0) / 3600
        parts.append(f"at {local(state.deadline)} (in {left:.1f} h)")
    if request.experiments is not None:
        num_left = max(request.experiments - len(decided(closed)), 0)
        parts.append(f"after {counted(num_left, 'more experiment')}")
        if next_stage(request.experiments - 1, 0, 1, request.pairs) is not Stage.SEARCH:
            num_last = 4 if request.pairs == 1 else 2 * request.pairs
            parts[-1] += f" (the last {num_last} of them measure baseline and incumbent)"
    if request.plateau is not None:
        parts.append(f"after {max(request.plateau - num_since_keep(closed), 0)} more without a keep")
    if request.until is not None:
        parts.append(f"when the score is at least {request.until:g} (lower bound of its 95 % interval)")
    if request.max_cost is not None:
        parts.append(f"at ${request.max_cost:,.2f} of the agents' own figures")
    return ", or ".join([*parts, f"when you create the file {STOP_NAME} or press Ctrl-C"])


def certified_line(comparison: Comparison) -> str:
    """Return the result of --certify in one line: incumbent minus baseline from fresh runs on the test split."""
    result = comparison.estimate
    low, high = (f"{100 * bound:+.1f}" for bound in result.interval)
    runs = f"{min(len(comparison.scores(side)) for side in SIDES)} fresh runs each"
    where = f"{comparison.plan.split} split, {runs}, 95 % interval {low} to {high} pp, p = {p_value(result):.2g}"
    difference = f"{100 * result.difference:+.1f} pp"
    crashes = f"; {comparison.crashes}" if comparison.crashes else ""
    return f"certified: {comparison.verdict}, {difference} incumbent minus baseline ({where}){crashes}"


class Notifier:
    """Runs the command for each notification, within `running`."""

    def __init__(self, command: str | None, note: Callable[[str], None], limit_seconds: float = 30.0) -> None:
        """`command` None: no notifications. Raises UsageError if the program does not exist."""
        fix = "Install the program, give its path, or omit --notify."
        self._words = program_words("--notify", command, fix) if command is not None else ()
        self._note, self._limit_seconds = note, limit_seconds
        self._tree = ProcessTree()
        self._processes = list[tuple[str, subprocess.Popen[bytes]]]()  # by event

    def send(self, event: str, message: Mapping[str, Any]) -> None:
        """Start the command, without waiting for it."""
        self._report()
        if not self._words:
            return
        marker = new_marker("notify")
        self._tree.markers.add(marker)
        env = {**os.environ, MARKER_NAME: marker}
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:  # another process group, so that Ctrl-C in the terminal does not reach the command
            process = subprocess.Popen(self._words, stdin=pipe, stdout=null, stderr=null, env=env, process_group=0)
        except OSError as error:
            self._note(f"--notify: the notification of {event} failed: {error}")
            return
        self._processes.append((event, process))
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # a command need not read its stdin
            process.stdin.write(as_json(message))  # never blocks: a message is smaller than the pipe's buffer

    @contextmanager
    def running(self) -> Iterator[None]:
        """At the end, wait for running commands (3 s after Ctrl-C), then end all of their processes."""
        seconds = self._limit_seconds
        try:
            yield
        except Interrupted:
            seconds = min(3.0, seconds)
            raise
        finally:
            try:
                ends_at = time.monotonic() + seconds
                for event, process in self._processes:
                    left_seconds = max(ends_at - time.monotonic(), 0.0)
                    with waiting(f"waiting for the --notify command ({event})", left_seconds), suppress(TimeoutExpired):
                        process.wait(left_seconds)
            finally:
                if self._words and (left := self._tree.end(_GRACE_SECONDS)):
                    self._note(f"--notify: could not be ended: {', '.join(left)}")
                self._report()

    def _report(self) -> None:
        """Report the commands that failed since the last call."""
        for event, process in self._processes:
            if process.poll():
                self._note(f"--notify: the notification of {event} failed: exit code {process.returncode}")
        self._processes = [(event, process) for event, process in self._processes if process.returncode is None]


class Notifications:
    """An observer that notifies the user of keeps, repeated crashes, waits and the end of a night."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._waits = set[tuple[str, str]]()  # already notified

    def __call__(self, desk: Desk, event: Event) -> None:
        if event.kind is Kind.OVER:
            self._notifier.send(END, message(END, desk, event.why))
        record, now = event.record, desk.controller.now()
        if record is not None and (name := event_of(record, desk.closed())) is not None:
            self._notifier.send(name, message(name, desk, record.why, record))
        waits = {(wait.kind, wait.meaning): wait for wait in desk.state.waits if wait.ended is None}
        self._waits &= waits.keys()
        for key, wait in waits.items():
            name = AGENT if wait.kind == "agent" else PAUSED
            # The user can end the wait, or the wait is long.
            is_users = wait.kind == "disk" or wait.meaning in AWAY or (wait.kind == "machine" and wait.num_checks > 1)
            if key not in self._waits and (is_users or wait.seconds(now) >= LONG_SECONDS):
                self._waits.add(key)
                self._notifier.send(name, message(name, desk, wait.describe()))


def event_of(record: Record, closed: Sequence[Record]) -> str | None:
    """Return KEEP, REPEATED_CRASH or None for a closed experiment. `closed`: the night's closed experiments.

    A crash is repeated if it is the second in a row with the same cause, apart from numbers.
    """
    if record.is_keep:
        return KEEP if record.parent is not None else None
    ended = by_end(closed)[-3:]
    causes = [re.sub(r"\d+", "#", r.why) if r.status == Verdict.CRASH else "" for r in ended]
    is_second = causes[-1:] != [""] and causes[-2:-1] == causes[-1:] != causes[-3:-2]
    return REPEATED_CRASH if is_second and ended[-1].number == record.number else None


def message(event: str, desk: Desk, why: str, record: Record | None = None) -> dict[str, Any]:
    """Return the JSON object for the command. `counts` is None if the records cannot be read."""
    counts, state, ledger = None, desk.state, desk.ledger
    try:
        records = ledger.records()
        campaign = Campaign.read(ledger, records, state.branch, state.rules_hash)
        counts = Counts.of(campaign.rows(state.closed(records)))
    except (UsageError, EngineError, OSError, ValueError) as error:
        desk.note(f"the notification has no counts: {error}")
    effect = record.decision.estimate if record and record.decision else None
    return {
        "version": MESSAGE_VERSION,
        "event": event,
        "campaign": state.branch,
        "experiment": record.number if record else None,
        "verdict": verdict_of(record) if record else None,
        "effect_at_decision": effect.mean if effect else None,
        "why": clean(why),
        "counts": None if counts is None else {"line": str(counts), **asdict(counts)},
        "page": str((ledger.runs_dir / PAGE_NAME).absolute()),
    }


def tag_night(desk: Desk, event: Event) -> None:
    """An observer that tags the branch at the end of a night that had experiments. The tag contains results.tsv and the
    certificate; `git push --tags` sends it."""
    state, controller = desk.state, desk.controller
    if event.kind is not Kind.OVER:
        return
    try:
        records = desk.ledger.records()
        if decided(state.closed(records)):
            name = f"night/{state.branch}/{controller.now().astimezone(UTC):%Y%m%dT%H%M%SZ}"
            lines = [f"Night on {state.branch}", "", state.certificate or "not certified", "", results_tsv(records)]
            controller.repo.tag(name, state.branch, "\n".join(lines))
            desk.note(f"tagged as {name}: git push --tags sends the results")
    except (NightshiftError, OSError) as error:
        desk.note(f"the night was not tagged: {error}")
