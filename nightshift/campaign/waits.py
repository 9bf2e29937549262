"""What a night waits for, and what it tells of its waits, its directions and TPE: the same words in the terminal,
`status`, night.txt, the page and report.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from nightshift.campaign.records import JOB_OF, Record
from nightshift.text import clean, local
from nightshift.waiting import lasted

FILL = "fill: tpe"  # the proposer of experiments that run while the agent is unavailable
CHECK_SECONDS = 10.0  # between two looks at a disk, a branch, a credential file
LONG_SECONDS = 3600.0  # without an answer: the user is notified
WaitKind = Literal["agent", "branch", "disk", "machine", "run"]  # run: one that infrastructure lost
_MAX_LINES = 8  # of earlier waits
_MAX_TEXT = 400


@dataclass(frozen=True, slots=True)
class Wait:
    """A condition that a night waits for, or waited for. Times are ISO 8601, UTC."""

    kind: WaitKind
    cause: str  # one line
    ends_when: str  # the condition, in words
    since: str
    checks_at: str | None = None  # when the condition is checked next; None: every CHECK_SECONDS
    num_checks: int = 1  # in vain
    meaning: str = ""  # why an agent is unavailable: a Meaning of agents/availability.py
    meanwhile: str = ""  # what the night does until then
    ended: str | None = None
    place: str = ""  # the slot or node that lost a run

    def describe(self) -> str:
        """Return the sentence that says what the night waits for."""
        check = f"within {CHECK_SECONDS:.0f} s" if self.checks_at is None else f"at {_clock(self.checks_at)}"
        cause, since = clean(self.cause, _MAX_TEXT), local(datetime.fromisoformat(self.since))
        meanwhile = f"; {self.meanwhile}" if self.meanwhile else ""
        return f"waiting since {since}: {cause}; ends when {self.ends_when}; next check {check}{meanwhile}"

    def is_free(self) -> bool:
        """Return True once the slot that lost a run may have another one."""
        check = self.checks_at if self.kind == "run" else None
        return check is not None and datetime.fromisoformat(check) <= datetime.now(UTC)

    def seconds(self, now: datetime) -> float:
        """Return how long the wait lasts or lasted."""
        end = now if self.ended is None else datetime.fromisoformat(self.ended)
        return max((end - datetime.fromisoformat(self.since)).total_seconds(), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NightStatus:
    """What the page shows of night.json. `cause` is set when the night is over.

    `directions`: the user's, each with the number of the first experiment for which it applied. `waits`: in the order
    in which they began; at most one of each kind, and of runs one of each place, has not ended.
    """

    branch: str
    first: int  # number of the night's first experiment
    started: str  # ISO 8601, UTC
    directions: tuple[tuple[int, str], ...] = ()
    waits: tuple[Wait, ...] = ()
    cause: str | None = None

    @property
    def direction(self) -> str:
        """The user's direction, as the last proposal had it."""
        return self.directions[-1][1] if self.directions else ""

    @property
    def waiting(self) -> tuple[str, ...]:
        """A sentence for each open wait; none for a slot that is free again, or once the night is over."""
        waits = [wait for wait in self.waits if wait.ended is None and self.cause is None]
        return tuple(wait.describe() for wait in waits if not wait.is_free())

    def morning(self, records: Sequence[Record], now: datetime) -> tuple[str, ...]:
        """Return the lines on the agent, TPE, pauses and directions of the night. `records`: of its campaign."""
        own = [record for record in records if record.number >= self.first and record.run.new is not None]
        num_fills = sum(record.proposal.proposer == FILL for record in own)
        lines = [*self.waiting]
        queued = [
            (datetime.fromisoformat(record.result.started) - datetime.fromisoformat(record.started)).total_seconds()
            for record in records
            if record.number >= self.first and record.result and JOB_OF in record.result.hardware
        ]
        if queued:
            line = f"Queue: {len(queued)} jobs waited {lasted(sum(queued))} in all, {lasted(max(queued))} at most"
            lines.append(f"{line}; --hours includes this, the times of runs do not")
        if num_fills:
            lines.append(f"Proposals: {len(own) - num_fills} by the agent, {num_fills} by TPE (agent unavailable)")
        ended = [wait for wait in self.waits if wait.ended is not None or self.cause is not None]
        for wait in sorted(ended, key=lambda wait: -wait.seconds(now))[:_MAX_LINES]:
            title = (
                "Agent unavailable" if wait.kind == "agent" else f"Paused on {wait.place}" if wait.place else "Paused"
            )
            end = _clock(wait.ended) if wait.ended else "the end"
            times = f"{local(datetime.fromisoformat(wait.since))} to {end} ({lasted(wait.seconds(now))})"
            lines.append(f"{title}: {times}: {clean(wait.cause, _MAX_TEXT)}")
        if len(ended) > _MAX_LINES:
            lines.append(f"and {len(ended) - _MAX_LINES} shorter pauses")
        for number, direction in self.directions:
            lines.append(f"Direction from experiment {number:04d} on: {clean(direction, 1_500) or 'none'}")
        return tuple(lines)


def _clock(text: str) -> str:
    return datetime.fromisoformat(text).astimezone().strftime("%H:%M:%S %Z")
