"""The waits of a night, and the lines about waits, directions and TPE that every view of a night shows."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import JOB_OF, Record
from nightshift.text import clean, local
from nightshift.waiting import lasted

FILL = "fill: tpe"  # the proposer of experiments that run while the agent is unavailable
CHECK_SECONDS = 30.0  # between two checks of a branch, a disk, or a machine
LONG_SECONDS = 3600.0  # a wait of this length is notified to the user
WaitKind = Literal["agent", "branch", "machine", "run"]  # run: a run was lost to an infrastructure failure
_MAX_LINES = 8  # of ended waits
_MAX_TEXT = 400


@dataclass(frozen=True, slots=True)
class Wait:
    """A condition for which a night waits or waited. Times are in UTC."""

    kind: WaitKind
    cause: str  # one line
    ends_when: str  # the condition, in words
    since: datetime
    checks_at: datetime | None = None  # time of the next check; None: every CHECK_SECONDS
    num_checks: int = 1  # failed checks
    meaning: str = ""  # why an agent is unavailable: a Meaning of agents/availability.py
    meanwhile: str = ""  # what the night does during the wait
    ended: datetime | None = None
    place: str = ""  # the slot or node that lost a run

    def describe(self) -> str:
        """Return a sentence about the wait."""
        check = f"within {CHECK_SECONDS:.0f} s" if self.checks_at is None else f"at {_clock(self.checks_at)}"
        meanwhile = f"; {self.meanwhile}" if self.meanwhile else ""
        begin = f"waiting since {local(self.since)}: {clean(self.cause, _MAX_TEXT)}"
        return f"{begin}; ends when {self.ends_when}; next check {check}{meanwhile}"

    def seconds(self, now: datetime) -> float:
        """Return the duration of the wait, until `now` if it has not ended."""
        return max(((self.ended or now) - self.since).total_seconds(), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NightStatus:
    """The part of night.json that the page shows."""

    branch: str
    first: int  # number of the night's first experiment
    started: str  # ISO 8601, UTC
    directions: tuple[tuple[int, str], ...] = ()  # each with the number of the first experiment to which it applied
    waits: tuple[Wait, ...] = ()  # in the order in which they began; one open wait per kind, for runs per place
    cause: str | None = None  # why the night is over; None while it runs
    pid: int = field(default_factory=os.getpid)  # of the controller; 0 after its end
    command: str = ""  # the command that resumes the night

    def is_on(self, ledger: Ledger) -> bool:
        """Return True if the night runs, False if it is over or was cut off."""
        return self.cause is None and ledger.is_running() and ledger.holder.startswith(f"process {self.pid} ")

    @property
    def direction(self) -> str:
        """The direction of the last proposal."""
        return self.directions[-1][1] if self.directions else ""

    @property
    def waiting(self) -> tuple[str, ...]:
        """A sentence for each open wait; none for a slot that may be used again, and when the night is over."""
        now, waits = datetime.now(UTC), [w for w in self.waits if w.ended is None and self.cause is None]
        return tuple(w.describe() for w in waits if w.kind != "run" or (w.checks_at or now) > now)

    def morning(self, records: Sequence[Record], now: datetime) -> tuple[str, ...]:
        """Return the lines about the agent, TPE, pauses and directions of the night. `records`: of the campaign."""
        records = [record for record in records if record.number >= self.first]
        proposers = [record.proposal.proposer for record in records if record.run.new is not None]
        lines = [*self.waiting]
        queued = [
            (datetime.fromisoformat(record.result.started) - datetime.fromisoformat(record.started)).total_seconds()
            for record in records
            if record.result and JOB_OF in record.result.hardware
        ]
        if queued:
            line = f"Queue: {len(queued)} jobs waited {lasted(sum(queued))} in all, {lasted(max(queued))} at most"
            lines.append(f"{line}; --hours includes this, the times of runs do not")
        if num_fills := proposers.count(FILL):
            num_others = len(proposers) - num_fills
            lines.append(f"Proposals: {num_others} by the agent, {num_fills} by TPE (agent unavailable)")
        ended = [wait for wait in self.waits if wait.ended is not None or self.cause is not None]
        for wait in sorted(ended, key=lambda wait: -wait.seconds(now))[:_MAX_LINES]:
            title = "Agent unavailable" if wait.kind == "agent" else f"Paused {wait.place}".strip()
            period = f"{local(wait.since)} to {_clock(wait.ended or now)}"
            lines.append(f"{title}: {period} ({lasted(wait.seconds(now))}): {clean(wait.cause, _MAX_TEXT)}")
        for number, direction in self.directions:
            lines.append(f"Direction from experiment {number:04d} on: {clean(direction, 1_500) or 'none'}")
        return tuple(lines)


def _clock(moment: datetime) -> str:
    return moment.astimezone().strftime("%H:%M:%S %Z")
