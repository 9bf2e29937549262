"""The observers of a night: a line per experiment, summary and page, notifications, and the tag."""

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from nightshift.agents.availability import AWAY
from nightshift.agents.notebook import notebook
from nightshift.agents.presets import program_words
from nightshift.campaign.campaign import Campaign, uncommitted
from nightshift.campaign.ledger import Ledger, runs_cost
from nightshift.campaign.records import (
    BLOCK_NAME,
    NO_SANDBOX,
    NOT_ISOLATED,
    NOTEBOOK_NAME,
    PAGE_NAME,
    SIDES,
    Comparison,
    Record,
    Verdict,
    percent,
)
from nightshift.campaign.results import Counts, last_scores, results_tsv, standing_text, verdict_of
from nightshift.campaign.waits import CHECK_SECONDS, LONG_SECONDS
from nightshift.errors import EngineError, Failure, Interrupted, NightshiftError
from nightshift.executors.process import ProcessGroup
from nightshift.experiment.experiment import Controller
from nightshift.files import as_json, write_atomically
from nightshift.night.state import STOP_NAME, Desk, Kind, NightState, decided, night_cost
from nightshift.report.sections import next_steps
from nightshift.report.text import measured
from nightshift.text import clean, counted, local
from nightshift.waiting import lasted, waiting

KEEP, END = "keep", "end"
END_SECONDS = 30.0  # for the commands of --notify after the night


def write_summary(state: NightState, controller: Controller) -> str:
    """Write the night's summary, notebook and page. Returns the summary. Raises UsageError if runs/ was moved."""
    from nightshift.report.page import write_report

    ledger, now = controller.ledger, controller.now()
    ledger.require_in_place()
    campaign = Campaign.read(ledger, ledger.records(), state.branch, state.rules_hash)
    text = summary(state, ledger, campaign, now)
    try:
        write_atomically(ledger.runs_dir / BLOCK_NAME, text.encode() + b"\n")
        write_atomically(ledger.runs_dir / NOTEBOOK_NAME, notebook(campaign).encode())
        write_report(ledger.root, now, branch=state.branch, is_live=state.is_on(ledger))
    except Interrupted:
        raise
    except Exception as error:  # neither a full disk nor a bug of the page may end the night
        controller.reporter.note(f"the page cannot be written: {type(error).__name__}: {error}")
    return text


class Page:
    """An observer that prints a line per experiment, writes summary and page, and prints the final summary."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._waits: object = ()  # of the last page; None: the page is old

    def __call__(self, desk: Desk, event: Kind | Record) -> None:
        """Write the page, which needs a second, only if there is nothing else to do and a record or wait is new."""
        if isinstance(event, Record):
            self._tell(experiment_line(event))
            self._waits = None
        elif event is Kind.STOPPED or (event is Kind.IDLE and self._waits != desk.state.waits):
            self._waits, text = desk.state.waits, write_summary(desk.state, desk.controller)
            if event is Kind.STOPPED:
                self._tell(text)


def summary(state: NightState, ledger: Ledger, campaign: Campaign, now: datetime) -> str:
    """Return the summary, a dozen lines."""
    records, began = campaign.records, datetime.fromisoformat(state.started)
    closed = state.closed(records)
    sure = ", ".join(change.name for change in campaign.kept if campaign.is_confirmed(change))
    unsure = ", ".join(change.name for change in campaign.kept if not campaign.is_confirmed(change))
    kept = f"confirmed (P(it helps) > 95 %): {sure or 'none'}; unconfirmed: {unsure or 'none'}"
    rows = [
        ("night", f"{state.request.agent} on {state.branch}"),
        ("since", f"{local(began)} ({lasted((now - began).total_seconds())})"),
        ("agent", NOT_ISOLATED if state.sandbox == NO_SANDBOX else ""),
        ("this night", str(Counts.of(campaign.rows(closed)))),
        ("cost", str(night_cost(state, ledger) + runs_cost(closed))),
        ("incumbent", standing_text(campaign.standing, campaign.kept) if campaign.standing else ""),
        ("kept", kept if campaign.kept else ""),
        ("final check runs", last_scores(closed)),
        ("git", clean(uncommitted(records, state.branch) or campaign.unread or "", 500)),
        *(("note", line) for line in state.morning(records, now)),
        ("certificate", state.certificate),
        ("stopped", clean(state.cause or "", 400)),
        ("page", f"runs/{PAGE_NAME}"),
        *(("next", f"{sentence} {command}") for sentence, command in next_steps(ledger, campaign, state)),
    ]
    return "\n".join(f"{name + ':':17} {text}" for name, text in rows if text)


def experiment_line(record: Record) -> str:
    """Return a line with number, change, measured score, effect at the decision, verdict and reason, and a line for
    each other change that the decision kept or reverted."""
    verdict, effect, why = verdict_of(record), record.decision and record.decision.estimate, record.why
    change = ", ".join(record.diff) or " + ".join(("the baseline", *(change.name for change in record.run.kept)))
    figures = [] if record.score is None else [f"measured {100 * record.score:.1f} %"]
    figures += [f"effect {effect}"] if effect else []
    figures.append(f"crash ({record.failure})" if verdict == "crash" else str(verdict))
    if effect and (effect.p_helps >= record.decision_rules.keep_at) == record.is_keep:
        why = f"P(it helps) {percent(effect.p_helps)}"
    line = f"{record.number:04d} {clean(change, 160)}{record.run.with_rider}: {', '.join(figures)}: {clean(why, 400)}"
    moved = (
        (f"{d.change.name} {d.action.past} by the decision of {record.number:04d}", d.estimate) for d in record.moved
    )
    return "\n".join([line, *(f"{text}: {estimate and estimate.with_p}" for text, estimate in moved)])


def next_stop(state: NightState, closed: Sequence[Record], now: datetime) -> str:
    """Return the stop rules that can be foreseen."""
    request, parts = state.request, list[str]()
    if state.deadline is not None:
        parts.append(f"at {local(state.deadline)} (in {max((state.deadline - now).total_seconds(), 0) / 3600:.1f} h)")
    if request.experiments is not None:
        parts.append(f"after {counted(max(request.experiments - len(decided(closed)), 0), 'more experiment')}")
    flags = "plateau", "until", "max-cost"
    parts += [f"by --{name} {value:g}" for name in flags if (value := getattr(request, name.replace("-", "_")))]
    return ", or ".join([*parts, f"when you create the file {STOP_NAME} or press Ctrl-C"])


def certified_line(c: Comparison) -> str:
    """Return the result of --certify in one line."""
    num = min(len(c.scores(side)) for side in SIDES)
    runs = f"{counted(num, 'scored run')} of each config, {c.plan.split} split"
    return "; ".join(filter(None, (f"certified: {c.verdict}, {measured(c)} ({runs})", c.crashes)))


class Notifier:
    """An observer that notifies the user of keeps, repeated crashes, waits and the end of a night: it runs the --notify
    command, within `running`, which can neither stop nor delay the night."""

    def __init__(self, command: str | None, note: Callable[[str], None], log_path: Path) -> None:
        """`command` None: no notifications. `log_path`: the output of the commands. Raises UsageError if the program
        does not exist."""
        fix = "Install the program, give its path, or omit --notify."
        self._words = program_words("--notify", command, fix) if command is not None else ()
        self._note, self._log_path = note, log_path
        self._waits = set[str]()  # already notified, by kind and time

    def __call__(self, desk: Desk, event: Kind | Record) -> None:
        now = desk.controller.now()
        if isinstance(event, Record):
            if name := event_of(event, desk.closed()):
                self.send(name, message(name, desk, event.why, event))
        elif event is Kind.OVER and desk.over:
            self.send(END, message(END, desk, desk.over.cause))
        for wait in desk.state.waits:
            limit = 0.0 if wait.meaning in AWAY else CHECK_SECONDS if wait.kind == "machine" else LONG_SECONDS
            key = f"{wait.kind} {wait.since}"
            if wait.ended is None and wait.seconds(now) >= limit and key not in self._waits:
                self._waits.add(key)
                name = "agent unavailable" if wait.kind == "agent" else "paused"
                self.send(name, message(name, desk, wait.describe()))

    @cached_property
    def _group(self) -> ProcessGroup:  # made by the first notification, when this process is the controller
        return ProcessGroup("notify", grace_seconds=2.0)

    def send(self, event: str, message: Mapping[str, Any]) -> None:
        """Start the command, without waiting for it, with one JSON object on stdin."""
        if not self._words:
            return
        self._report()
        log, pipe = self._log_path, subprocess.PIPE
        if not os.access(log.parent, os.W_OK) or log.is_symlink():
            log = Path(tempfile.gettempdir(), f"nightshift-notify-{os.getpid()}.log")
        try:
            child = self._group.start(event, self._words, log_path=log, env=os.environ, cwd=Path.cwd(), stdin=pipe)
        except EngineError as error:
            self._note(f"--notify: the notification of {event} failed: {error.cause}")
            return
        assert child.stdin is not None
        with suppress(BrokenPipeError), child.stdin:  # a command need not read its stdin
            child.stdin.write(as_json(message))  # never blocks: a message is smaller than the pipe's buffer

    @contextmanager
    def running(self) -> Iterator[None]:
        """At the end, wait for running commands, then end all of their processes."""
        seconds = END_SECONDS
        try:
            yield
        except Interrupted:
            seconds = 3.0
            raise
        finally:
            if "_group" in vars(self):  # a command was started
                ends_at = time.monotonic() + seconds
                try:
                    with waiting("waiting for the --notify command", seconds):
                        while len(self._group.check()) < len(self._group.children) and time.monotonic() < ends_at:
                            time.sleep(0.1)
                finally:
                    self._group.stop()
                    self._report()

    def _report(self) -> None:
        """Report the commands that failed since the last call."""
        for child in self._group.check():
            self._group.children.remove(child)
            if child.returncode:
                self._note(f"--notify: the notification of {child.name} failed: {child.exit_cause()}")


def event_of(record: Record, closed: Sequence[Record]) -> str | None:
    """Return the event of a closed experiment, or None. `closed`: the night's closed experiments.

    A crash is repeated if it is the second in a row with the same cause, apart from numbers.
    """
    if record.is_keep:
        return KEEP if record.parent is not None else None
    ended = [r for r in closed if r.number <= record.number and r.failure is not Failure.INTERRUPTED]
    causes = [re.sub(r"\d+", "#", r.why) if r.status == Verdict.CRASH else "" for r in ended]
    earlier, previous, last = ["", "", *causes][-3:]
    return "repeated crash" if record in ended and last and last == previous != earlier else None


def message(event: str, desk: Desk, why: str, record: Record | None = None) -> dict[str, Any]:
    """Return the JSON object for the command. `counts` is None if the records cannot be read."""
    counts, state, ledger = None, desk.state, desk.ledger
    with suppress(NightshiftError):
        campaign = Campaign.read(ledger, ledger.records(), state.branch, state.rules_hash)
        counts = Counts.of(campaign.rows(state.closed(campaign.records)))
    effect = record.decision.estimate if record and record.decision else None
    return {
        "version": 2,
        "event": event,
        "campaign": state.branch,
        "experiment": record.number if record else None,
        "verdict": verdict_of(record) if record else None,
        "effect_at_decision": effect.mean if effect else None,
        "why": clean(why),
        "counts": counts and {"line": str(counts), **asdict(counts)},
        "page": str((ledger.runs_dir / PAGE_NAME).absolute()),
    }


def tag_night(desk: Desk, event: Kind | Record) -> None:
    """An observer that tags the branch at the end of a night that had experiments. The tag contains results.tsv and the
    certificate; `git push --tags` sends it."""
    state = desk.state
    if event is not Kind.OVER:
        return
    try:
        records = desk.ledger.records()
        if decided(state.closed(records)):
            name = f"night/{state.branch}/{desk.controller.now().astimezone(UTC):%Y%m%dT%H%M%SZ}"
            lines = [f"Night on {state.branch}", "", state.certificate or "not certified", "", results_tsv(records)]
            desk.controller.repo.tag(name, state.branch, "\n".join(lines))
            desk.note(f"tagged as {name}: git push --tags sends the results")
    except (NightshiftError, OSError) as error:
        desk.note(f"the night was not tagged: {error}")
