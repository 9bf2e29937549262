"""What goes on in a checkout, for who only looks: `nightshift status`, `show`, and `wait` until it is over."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from nightshift.campaign.ledger import STARTED, Ledger, campaign_cost, read_progress
from nightshift.campaign.metrics import METRICS_NAME
from nightshift.campaign.records import (
    BLOCK_NAME,
    CERTIFY_NAME,
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
from nightshift.campaign.results import Counts, Row, fates_of, gain_text, last_campaign, row, standing_text
from nightshift.cli.output import print_error, print_text, summary
from nightshift.cli.progress import describe_run, reporting
from nightshift.config.train_toml import UNSET
from nightshift.errors import ExitCode, UsageError
from nightshift.files import Document, read_file
from nightshift.report.fields import OF_RUN, fields
from nightshift.text import clean, local
from nightshift.waiting import lasted


def shown(ledger: Ledger, record: Record, row: Row) -> dict[str, Any]:
    """`nightshift show --json`: the record, its `row` as every view prints it, and `files`, its folder."""
    return {
        **msgspec.to_builtins(record, builtin_types=(msgspec.Raw,)),
        "files": ledger.run_dir(record.number).relative_to(ledger.root),
        "row": row,
    }


def experiment_lines(record: Record, row: Row, files: Path) -> Iterator[str]:
    """Yield one screen about an experiment: what the run printed, and what became of it."""
    lines = [field for field in fields(record, row) if field[0] not in OF_RUN]
    lines.append(("started", f"{local(datetime.fromisoformat(record.started))} on {record.branch}"))
    lines.append(("files", str(files)))
    lines.append(("more", f"uv run nightshift show {record.number} --all"))
    yield from (f"{name + ':':17} {text}" for name, text in lines)


def all_lines(value: Any, name: str, indent: str = "") -> Iterator[str]:
    """Yield `name: value` of everything in a JSON value, inner values indented; `unset` where there is none."""
    if isinstance(value, dict) and value:
        yield f"{indent}{name}:"
        for inner, each in value.items():
            yield from all_lines(each, inner, indent + "  ")
    elif isinstance(value, list) and 0 < len(value) <= _MOST_VALUES:
        for each in value:
            yield from all_lines(each, name, indent)
    else:
        text = UNSET if value in (None, "", [], {}) else str(value)
        if isinstance(value, list) and value:
            text = f"{len(value):,} values: --json prints them"
        yield from (f"{indent}{name + ':':23} {line}" for line in text.splitlines())


TIMED_OUT = 124  # as timeout(1)
_NUM_LOG_LINES = 15  # of a crash
_MOST_VALUES = 40  # of a list that `show --all` prints
_TORCHRUN = re.compile(r"E\d{4} [\d:.]+ \d+ torch/distributed/elastic/")  # 31 lines below what its worker logged last
_LOOK_SECONDS = 0.5  # between two looks at how far the runs are


def wait_for_verdict(root: Path, timeout_seconds: float) -> int:
    """Wait for the experiment in flight, print its summary, return its exit code; 124 while it still runs."""
    ledger, deadline = Ledger(root), time.monotonic() + timeout_seconds
    limit = "" if math.isinf(timeout_seconds) else f", at most {lasted(timeout_seconds)}"
    with reporting(f"waiting for the verdict of the experiment in flight{limit}", "What runs continues.") as reporter:
        while ledger.is_running():
            if time.monotonic() >= deadline:
                print_text(*Status.of(ledger, datetime.now(UTC)).lines())
                return TIMED_OUT
            started = [record.number for record in ledger.readable()[0] if record.status == STARTED]
            what = f"waiting for the next experiment of {ledger.holder}"
            reporter.show({folder: read_progress(folder) for folder in map(ledger.run_dir, started)}, what)
            time.sleep(_LOOK_SECONDS)
    records, _ = ledger.readable()
    if not records:
        raise UsageError("no experiments yet", "Start one: uv run run.py")
    if records[-1].judgement is None:
        cause = f"experiment {records[-1].number:04d} was killed before its verdict"
        raise UsageError(cause, "The next run.py closes it as a crash.")
    return print_verdict(records[-1], ledger)


def print_verdict(record: Record, ledger: Ledger) -> int:
    """Print the summary of an experiment and return its exit code. For a crash, print the last lines of the log that
    shows the cause on stderr: worker.log if the worker returned no result. The lines are indented, so that no line of a
    log looks like a line of the summary where both streams go to one file."""
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
    """Print what a detached night says from now until it is over, and its summary. UsageError if there was no night, or
    if it was cut off.

    Returns: 0 if a stop rule or the user ended the night, 1 if it could not go on, 124 while it still runs.
    """
    from nightshift.night.state import load

    ledger, deadline = Ledger(root), time.monotonic() + timeout_seconds
    log = ledger.runs_dir / DETACHED_NAME
    start = num_printed = log.stat().st_size if log.exists() else 0
    with reporting("waiting for the end of the night: status shows what stops it", "The night continues."):
        while True:
            is_on = ledger.is_running()  # before the state: a night writes its end, then lets the checkout go
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
            time.sleep(_LOOK_SECONDS)
    if state.cause is None:
        raise UsageError("the night was cut off", "Run the same command again to resume.")
    if num_printed == start:  # else the summary was the last that the night printed
        print_text(read_file(ledger.runs_dir / BLOCK_NAME).decode(errors="replace").rstrip())
    return ExitCode.MEASURED if state.is_planned else ExitCode.CRASH


def is_under_way(ledger: Ledger, since: float) -> bool:
    """Whether a run that began after `since`, in seconds since 1970, trains, or a night waits for its agent."""
    from nightshift.night.state import load

    paths = [*ledger.runs_dir.glob(f"*/{METRICS_NAME}"), *ledger.runs_dir.glob(f"{CERTIFY_NAME}/*/*/{METRICS_NAME}")]
    if (state := load(ledger)) and state.waiting:
        paths.append(ledger.runs_dir / NIGHT_NAME)
    return any(path.stat().st_mtime > since for path in paths)


class Running(msgspec.Struct, frozen=True):
    """An experiment in flight. `progress`: how far its run is, None if it has not begun; `phase`: the same in words."""

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
    """The last night. `state`: it is running, over (by its `cause`), or was cut off; `left`: the jobs in SLURM that are
    not collected, by experiment or side and seed of a certificate; `num_experiments`: its own that are decided."""

    agent: str
    branch: str
    since: str
    num_experiments: int
    state: Literal["running", "over", "cut off"]
    cause: str | None
    next_stop: str | None
    left: dict[str, str]
    direction: str
    waiting: str | None  # what the night waits for, since when, what ends the wait, when that is checked next
    notes: tuple[str, ...]  # on the agent, TPE, pauses and directions
    certificate: str | None


class Incumbent(msgspec.Struct, frozen=True, kw_only=True):
    """The baseline plus the kept changes, and what is believed of both now. `kept`: in the order of adoption."""

    kept: tuple[Change, ...]
    standing: Standing
    num_baseline_runs: int  # measured, of this campaign


class Status(Document, frozen=True, kw_only=True, tag="status"):
    """What runs, what the last campaign holds, what the night does: `nightshift status`.

    `next_start`: what run.py or a night would do with branches here; None on a campaign's branch.
    `branch`, `rules_hash`, `counted`, `cost` (with the proposals that nights refused) and `incumbent` are the last
    campaign's. `damaged`: what could not be read.
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
    controller: str | None = None  # process and command that work in the checkout

    @classmethod
    def of(cls, ledger: Ledger, now: datetime, next_start: str | None = None) -> Status:
        records, damaged = ledger.readable()
        whose = last_campaign(records)
        ours = [record for record in records if whose in (("", ""), (record.branch, record.rules_hash))]
        is_running = ledger.is_running()
        incumbent, unread = _incumbent(ledger, records, ours)
        fates = fates_of(ours, incumbent.kept if incumbent else ())
        return cls(
            is_running=is_running,
            running=tuple(Running.of(ledger, r, now) for r in records if is_running and r.status == STARTED),
            branch=whose[0] or None,
            rules_hash=whose[1] or None,
            counted=Counts.of([row(record, fates) for record in ours]),
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
            rows.append(("running", f"no run at this moment; {self.controller}" if self.is_running else "nothing"))
        rows += [("start", self.next_start), ("results", self.counted), ("cost", self.cost)]
        night = self.night
        if (incumbent := self.incumbent) is not None:
            rows.append(("incumbent", standing_text(incumbent.standing, incumbent.kept)))
            rows += [("kept", change) for change in incumbent.kept]
            if incumbent.kept and incumbent.num_baseline_runs == 1 and not (night and night.state == "running"):
                gain = f"the gain {gain_text(incumbent.standing)} rests on one run of the baseline"
                rows.append(("note", f"{gain}; two more make it more certain: uv run run.py --baseline"))
        if night is not None:
            plural = "" if night.num_experiments == 1 else "s"
            words = f"since {local(datetime.fromisoformat(night.since))}, {night.num_experiments} experiment{plural}"
            if night.state == "over":
                words = f"is over: {clean(night.cause or '', 400)}"
            elif night.state == "cut off":
                how = ", and takes the jobs over; nightshift night --stop cancels them" if night.left else ""
                words = f"was cut off: run the same command again to resume{how}"
            rows += [("certificate", night.certificate)]
            rows += [("left", f"{number} is the job {name} in SLURM") for number, name in night.left.items()]
            rows += [("night", f"{night.agent} {words}"), ("waiting", night.waiting)]
            rows += [("note", note) for note in night.notes]
            rows.append(("stops", night.next_stop))
        return [f"{name and name + ':':12} {value}" for name, value in rows if value]


def _incumbent(ledger: Ledger, records: Sequence[Record], ours: Sequence[Record]) -> tuple[Incumbent | None, list[str]]:
    """Return the incumbent of one campaign, `ours`, and why scores or your own commits could not be read."""
    from nightshift.campaign.campaign import Campaign

    if not ours:
        return None, []
    try:
        campaign = Campaign.read(ledger, records, ours[-1].branch, ours[-1].rules_hash)
    except UsageError as error:
        return None, [str(error)]
    unread = [campaign.unread] if campaign.unread else []
    if campaign.standing is None:
        return None, unread
    num_baseline_runs = sum(r.run.is_baseline for r in ours if r.evaluation and r.status != Verdict.CRASH)
    return Incumbent(kept=campaign.kept, standing=campaign.standing, num_baseline_runs=num_baseline_runs), unread


def _night(ledger: Ledger, records: Sequence[Record], is_running: bool, now: datetime) -> Night | None:
    from nightshift.night.state import decided, load

    state = load(ledger)
    if state is None:
        return None
    from nightshift.executors.slurm import jobs_left
    from nightshift.night.observers import next_stop

    is_on = state.cause is None and is_running and ledger.holder.startswith(f"process {state.pid} ")
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
    )
