"""Commands that only read a checkout: `nightshift status`, `show` and `wait`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from nightshift.campaign.ledger import STARTED, Ledger, campaign_cost, read_progress
from nightshift.campaign.records import (
    BLOCK_NAME,
    DETACHED_NAME,
    LOG_NAME,
    NIGHT_NAME,
    Change,
    Cost,
    Progress,
    Record,
    Standing,
    Verdict,
)
from nightshift.campaign.results import Counts, Row, fates_of, last_campaign, one_baseline, row, standing_text
from nightshift.cli.output import NEXT, print_error, print_text, summary
from nightshift.cli.progress import describe_run, reporting
from nightshift.config.train_toml import UNSET
from nightshift.errors import ExitCode, UsageError
from nightshift.files import Document, read_file
from nightshift.report.fields import OF_RUN, fields
from nightshift.text import clean, counted, local


def shown(ledger: Ledger, record: Record, row: Row) -> dict[str, Any]:
    """Return the content of `nightshift show --json`: the record, its `row`, and `files`, the folder of its run."""
    return {
        **msgspec.to_builtins(record, builtin_types=(msgspec.Raw,)),
        "files": ledger.run_dir(record.number).relative_to(ledger.root),
        "row": row,
    }


def experiment_lines(record: Record, row: Row, files: Path) -> Iterator[str]:
    """Yield the lines of `nightshift show`: the proposal, the summary of the run, and the files."""
    lines = [field for field in fields(record, row) if field[0] not in OF_RUN]
    lines.append(("started", f"{local(datetime.fromisoformat(record.started))} on {record.branch}"))
    lines.append(("files", str(files)))
    lines.append(("more", f"uv run nightshift show {record.number} --all"))
    yield from (f"{name + ':':17} {text}" for name, text in lines)


def all_lines(value: Any, name: str, indent: str = "") -> Iterator[str]:
    """Yield `name: value` for everything in a JSON value, inner values indented; `unset` for what is empty."""
    if isinstance(value, dict) and value:
        yield f"{indent}{name}:"
        for inner_name, inner in value.items():
            yield from all_lines(inner, inner_name, indent + "  ")
    elif isinstance(value, list) and 0 < len(value) <= _MOST_VALUES:
        for item in value:
            yield from all_lines(item, name, indent)
    else:
        text = UNSET if value in (None, "", [], {}) else str(value)
        if isinstance(value, list) and value:
            text = f"{len(value):,} values: --json prints them"
        yield from (f"{indent}{name + ':':23} {line}" for line in text.splitlines())


TIMED_OUT = 124  # as timeout(1)
_NUM_LOG_LINES = 15  # of a crash
_MOST_VALUES = 40  # of a list in `show --all`
_TORCHRUN = re.compile(r"E\d{4} [\d:.]+ \d+ torch/distributed/elastic/")  # torchrun's 31 lines behind the worker's log
_POLL_SECONDS = 0.5
_LOOK = (
    "see the net change: uv run nightshift diff baseline incumbent; "
    "see what to copy and what to do next: uv run nightshift report"
)


def wait_for_verdict(root: Path, timeout_seconds: float) -> int:
    """Wait for the experiment in flight and print its summary. Return its exit code; 124 if it still runs."""
    ledger, deadline = Ledger(root), time.monotonic() + timeout_seconds
    with reporting("waiting for the verdict of the experiment in flight", "The run continues.") as reporter:
        while ledger.is_running():
            if time.monotonic() >= deadline:
                print_text(*Status.of(ledger, datetime.now(UTC)).lines())
                return TIMED_OUT
            started = [record.number for record in ledger.readable()[0] if record.status == STARTED]
            what = f"waiting for the next experiment of {ledger.holder}"
            reporter.show({folder: read_progress(folder) for folder in map(ledger.run_dir, started)}, what)
            time.sleep(_POLL_SECONDS)
    records, _ = ledger.readable()
    if not records:
        raise UsageError("no experiments yet", "Start one: uv run run.py")
    if records[-1].judgement is None:
        cause = f"experiment {records[-1].number:04d} was killed before its verdict"
        raise UsageError(cause, "The next run.py closes it as a crash.")
    return print_verdict(records[-1], ledger)


def print_verdict(record: Record, ledger: Ledger) -> int:
    """Print the summary of an experiment and return its exit code. For a crash, also print the end of the log with the
    cause to stderr: worker.log if the worker returned no result. Log lines are indented, so that none is mistaken for a
    line of the summary if both streams go to one file."""
    from nightshift.executors.process import tail

    print_text(summary(record))
    if record.status != Verdict.CRASH:
        return ExitCode.MEASURED
    if record.failure == "interrupted":
        return ExitCode.INTERRUPTED
    if name := record.result.training.log if record.result else LOG_NAME:
        path = ledger.run_dir(record.number) / name
        if lines := tail(path, 4 * _NUM_LOG_LINES):
            title = f"--- last lines of {path.relative_to(ledger.root)}"
            end = next((at for at, line in enumerate(lines) if _TORCHRUN.match(line)), len(lines))
            print_error("\n".join([title, *(f"  {line}" for line in lines[:end][-_NUM_LOG_LINES:])]))
    return ExitCode.CRASH


def follow_night(root: Path, timeout_seconds: float) -> int:
    """Print the output of a detached night from now until its end, and its summary. UsageError if there was no night,
    or if it was killed.

    Returns: 0 if a stop rule or the user ended the night, 1 if it failed, 124 if it still runs.
    """
    from nightshift.night.state import load

    ledger, deadline = Ledger(root), time.monotonic() + timeout_seconds
    log = ledger.runs_dir / DETACHED_NAME
    start = num_printed = log.stat().st_size if log.exists() else 0
    with reporting("waiting for the end of the night; status shows what ends it", "The night continues."):
        while True:
            is_on = ledger.is_running()  # read before the state: a night writes its end, then releases the lock
            state = load(ledger)
            if state is None:
                raise UsageError("no night was started here yet", "Start one: uv run nightshift night --agent tpe.")
            if new := read_file(log)[num_printed:] if log.exists() else b"":
                print_text(new.decode(errors="replace").rstrip("\n"))
                num_printed += len(new)
            if not is_on:
                break
            if time.monotonic() >= deadline:
                return TIMED_OUT
            time.sleep(_POLL_SECONDS)
    if state.cause is None:
        raise UsageError("the night was cut off", "Run the same command again to resume.")
    if num_printed == start:  # else the output of the night ended with the summary
        print_text(read_file(ledger.runs_dir / BLOCK_NAME).decode(errors="replace").rstrip())
    return ExitCode.MEASURED if state.is_planned else ExitCode.CRASH


def is_under_way(ledger: Ledger, since: float) -> bool:
    """Return True if a night has begun after `since` (seconds since 1970)."""
    path = ledger.runs_dir / NIGHT_NAME
    return path.exists() and path.stat().st_mtime > since


class Running(msgspec.Struct, frozen=True):
    """An experiment in flight. `progress`: the run's own report, None before it starts; `phase`: the same in words."""

    number: int
    since: str
    seconds: float
    description: str
    progress: Progress | None
    phase: str

    @classmethod
    def of(cls, ledger: Ledger, record: Record, now: datetime) -> Running:
        folder, seconds = ledger.run_dir(record.number), (now - datetime.fromisoformat(record.started)).total_seconds()
        progress, text = read_progress(folder), record.proposal.description
        return cls(record.number, record.started, seconds, text, progress, describe_run(folder, progress)[0])


class Night(msgspec.Struct, frozen=True, kw_only=True):
    """The last night. `cause`: why the night is over. `left`: the SLURM jobs whose results are not collected, by
    experiment, or by side and seed of a certificate. `num_experiments`: of this night, decided."""

    agent: str
    branch: str
    since: str
    num_experiments: int
    state: Literal["running", "over", "cut off"]
    cause: str | None
    next_stop: str | None
    left: dict[str, str]
    direction: str
    waiting: str | None  # cause, begin, and end of the night's wait
    notes: tuple[str, ...]  # on the agent, TPE, pauses and directions
    certificate: str | None
    command: str  # which resumes the night


class Incumbent(msgspec.Struct, frozen=True, kw_only=True):
    """The baseline plus the kept changes, and the current estimates. `kept`: in the order in which they were kept."""

    kept: tuple[Change, ...]
    standing: Standing
    rests_on_one_baseline: bool  # the gain is uncertain because the baseline has only one measured run
    certificate: str | None  # its result in one line
    unfinished_comparison: int | None  # its number, for `certify --resume`


class Status(Document, frozen=True, kw_only=True, tag="status"):
    """The content of `nightshift status`.

    `branch`, `rules_hash`, `counted`, `cost` (including refused proposals) and `incumbent` are of the last campaign.
    `next_start`: what run.py or a night would do with branches; None on a campaign's branch. `damaged`: what could not
    be read.
    """

    is_running: bool
    running: tuple[Running, ...]
    branch: str | None
    rules_hash: str | None
    counted: Counts
    cost: Cost
    incumbent: Incumbent | None
    night: Night | None
    damaged: tuple[str, ...]
    next_start: str | None = None
    controller: str | None = None  # process and command that hold the lock

    @classmethod
    def of(cls, ledger: Ledger, now: datetime, next_start: str | None = None) -> Status:
        records, damaged = ledger.readable()
        campaign = last_campaign(records)
        ours = [record for record in records if campaign in (("", ""), record.campaign)]
        is_running = ledger.is_running()
        incumbent, unread = _incumbent(ledger, records, ours)
        fates = fates_of(ours, incumbent.kept if incumbent else ())
        return cls(
            is_running=is_running,
            running=tuple(Running.of(ledger, r, now) for r in records if is_running and r.status == STARTED),
            branch=campaign[0] or None,
            rules_hash=campaign[1] or None,
            counted=Counts.of([row(record, fates) for record in ours if record.status != STARTED]),
            cost=campaign_cost(ledger.runs_dir, ours),
            incumbent=incumbent,
            night=_night(ledger, records, is_running, now),
            damaged=(*damaged, *unread),
            next_start=next_start,
            controller=ledger.holder or None if is_running else None,
        )

    def lines(self) -> list[str]:
        rows: list[tuple[str, object]] = [("damaged", cause) for cause in self.damaged]
        for running in self.running:
            began = datetime.fromisoformat(running.since).astimezone()
            rows.append(("running", f"{running.number:04d}: {running.phase}, since {began:%H:%M:%S %Z}"))
            rows.append(("", running.description))
        if not self.running:
            held = f"no experiment now; running command: {self.controller or 'unknown'}"
            rows.append(("running", held if self.is_running else "nothing"))
        rows += [("start", self.next_start), ("results", self.counted), ("cost", f"{self.cost} (without certificates)")]
        night = self.night
        if (incumbent := self.incumbent) is not None:
            rows.append(("incumbent", standing_text(incumbent.standing, incumbent.kept)))
            rows += [("kept", change) for change in incumbent.kept]
            rows.append(("certificate", incumbent.certificate))
            is_on = night is not None and night.state == "running"
            if incumbent.rests_on_one_baseline and incumbent.certificate is None and not is_on:
                rows.append(("note", " ".join(one_baseline(incumbent.standing))))
            if (number := incumbent.unfinished_comparison) is not None and not self.is_running:
                finish = f"uv run nightshift certify --resume {number:04d}"
                rows.append(("note", f"comparison {number:04d} is unfinished. Finish it: {finish}"))
        if night is not None:
            words = f"since {local(datetime.fromisoformat(night.since))}, {counted(night.num_experiments)}"
            if night.state == "over":
                words = f"is over: {clean(night.cause or '', 400)}"
            elif night.state == "cut off":
                jobs = "; to cancel its jobs: uv run nightshift night --stop" if night.left else ""
                words = f"was cut off: run the same command again to resume: {night.command}{jobs}"
            if not (self.incumbent and self.incumbent.certificate):
                rows.append(("certificate", night.certificate))
            rows += [("left", f"{number} is the SLURM job {name}") for number, name in night.left.items()]
            rows += [("night", f"{night.agent} {words}"), ("waiting", night.waiting)]
            rows += [("note", note) for note in night.notes]
            rows.append(("stops", night.next_stop))
        if self.incumbent and not self.is_running:
            rows.append(("next", _LOOK if self.incumbent.kept else NEXT))
        return [f"{name and name + ':':12} {value}" for name, value in rows if value]


def _incumbent(ledger: Ledger, records: Sequence[Record], ours: Sequence[Record]) -> tuple[Incumbent | None, list[str]]:
    """Return the incumbent of one campaign, whose records are `ours`, and what could not be read."""
    from nightshift.campaign.campaign import Campaign
    from nightshift.night.observers import certified_line
    from nightshift.report.data import certificates

    if not ours:
        return None, []
    try:
        campaign = Campaign.read(ledger, records, ours[-1].branch, ours[-1].rules_hash)
    except UsageError as error:
        return None, [str(error)]
    unread = [campaign.unread] if campaign.unread else []
    if campaign.standing is None:
        return None, unread
    certificate, unfinished = certificates(ledger, campaign)
    incumbent = Incumbent(
        kept=campaign.kept,
        standing=campaign.standing,
        rests_on_one_baseline=campaign.rests_on_one_baseline,
        certificate=certified_line(certificate) if certificate else None,
        unfinished_comparison=unfinished,
    )
    return incumbent, unread


def _night(ledger: Ledger, records: Sequence[Record], is_running: bool, now: datetime) -> Night | None:
    from nightshift.night.state import decided, load

    state = load(ledger)
    if state is None:
        return None
    from nightshift.executors.slurm import jobs_left
    from nightshift.night.observers import next_stop

    is_on = is_running and state.is_on(ledger)
    left = jobs_left(ledger, state.first, of_certificates=True) if state.cause is None and not is_on else {}
    return Night(
        agent=state.request.agent,
        branch=state.branch,
        since=state.started,
        num_experiments=len(decided(state.closed(records))),
        state="over" if state.cause is not None else "running" if is_on else "cut off",
        cause=state.cause,
        next_stop=next_stop(state, state.closed(records), now) if is_on else None,
        left={folder.name: job.name for folder, job in sorted(left.items())},
        direction=state.direction,
        waiting=" And ".join(state.waiting) or None if is_on else None,
        notes=tuple(line for line in state.morning(records, now) if line not in state.waiting),
        certificate=state.certificate,
        command=state.command,
    )
