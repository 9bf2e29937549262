"""Score answers in a separate process with limits, which can be killed and restarted.

The code of a package may raise, hang, exit, print, fork or use all memory. The process
(environments/taskset/nightshift_taskset/process.py) has a time limit for each answer and a memory limit, and its whole
process tree is killed. An answer that cannot be scored scores 0 and is counted. If too many answers fail, the run ends.
"""

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from subprocess import PIPE, TimeoutExpired
from typing import Any

import msgspec

from nightshift.campaign.records import Seconds
from nightshift.config.rules import Fraction
from nightshift.errors import EngineError
from nightshift.executors.process import Pipes, ProcessGroup, python_command, python_environment, tail
from nightshift.files import parse_json
from nightshift.text import clean

# Chosen, not measured: rewards of verifiers' own examples take about a millisecond, math-verify on hostile LaTeX 0.4 s.
ANSWER_SECONDS = 10.0
LOST_SECONDS = 120.0  # limit of the time lost to answers without a score and to restarts, in sum
LOAD_SECONDS = 300.0  # importing verifiers alone takes 3 to 15 s
MEMORY_BYTES = 4 << 30  # limit of private memory; memory-mapped data sets do not count
MIN_ALL_FAILED = 32  # the run ends if all of at least so many answers failed
CONCURRENCY = 128  # parallel episodes; verifiers needs milliseconds of CPU time per turn
_FEWER = 8  # after the process died, a batch has an eighth of the episodes at once, to find the one that kills it
_LATE = "scoring timed out"  # verifiers' words
_RETRIES = 3  # retries of an episode after a server error, the same number as an engine's for a broken connection
_PAUSE_SECONDS = 1.0  # before a retry after a server error
STALL_SECONDS = 120.0  # without an answer of the server
SILENCE_SECONDS = 30.0  # limit without a reply while episodes are played; the process replies every second
_GRACE_SECONDS = 0.5
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # prepare.py has fetched everything
_FIX = "Check the environment: uv run nightshift doctor --environment"


_CORRECT = (
    "If data is missing, run: uv run prepare.py. If a package is missing: uv pip install NAME. Else correct the code."
)


class _Failed(Exception):
    """There is no reply, or the taskset failed. The message is the cause."""


class TaskExample(msgspec.Struct):
    """An Example of a taskset. `messages`: the chat that asks the question."""

    key: str
    answer: str
    messages: list[dict[str, str]]


class Played(msgspec.Struct):
    """The result of an episode for the seat that scores. One of the first three fields is set: an episode that `failed`
    scores 0, `refused` ends the run. `text`: the conversation."""

    score: Fraction | None = None
    failed: str | None = None
    refused: str | None = None
    key: str = ""
    text: str = ""
    num_tokens: int = 0
    truncated: bool = False
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    is_server_fault: bool = False


class _Reply(msgspec.Struct):
    """A reply of process.py: one of the first eight fields, and the CPU time so far.

    While episodes are played, an empty reply is a pulse, and `blocked` reports code that blocked the event loop.
    """

    ready: bool | None = None
    examples: list[TaskExample] | None = None
    score: Fraction | None = None
    episode: Played | None = None
    finished: bool | None = None
    refused: str | None = None
    failed: str | None = None
    blocked: str | None = None
    cpu_seconds: Seconds = 0.0


class Scorer:
    """The process of one environment. The process starts with the first request, and again after it was killed.

    `is_secret`: show only the type of an exception, because the message may contain answers. `is_online`: the process
    may fetch data.
    """

    def __init__(self, name: str, program: Path, spec: Mapping[str, Any]) -> None:
        """`name`: of the environment. `spec`: the request `open` of process.py."""
        self.num_scored = self.num_failed = 0
        self.first_cause = ""
        self.is_secret = self.is_online = False
        self._name, self._program, self._spec = name, program, {**spec, "memory": MEMORY_BYTES}
        self._lost_seconds = self._cpu_before = self._cpu_now = 0.0
        self._group: ProcessGroup | None = None

    @property
    def cpu_seconds(self) -> float:
        """CPU time of scoring, with the children of the process."""
        return self._cpu_before + self._cpu_now

    def load(self, split: str) -> list[TaskExample]:
        """Return the examples of a split. EngineError if the taskset is refused or cannot be loaded."""
        try:
            examples: list[TaskExample] = self._ask({"load": split}, "examples", LOAD_SECONDS)
        except _Failed as failed:
            raise EngineError(f"environment {self._name}: {failed}", _CORRECT) from None
        return examples

    def score(self, text: str, key: str) -> float:
        """Return the score, 0..1; 0 if the reward fails. EngineError for a reward out of range, or if too many fail."""
        began = time.monotonic()
        self.num_scored += 1
        try:
            return float(self._ask({"score": key, "text": text}, "score", ANSWER_SECONDS))
        except _Failed as failed:
            self.num_failed += 1
            self.first_cause = self.first_cause or str(failed)
        self._lost_seconds += time.monotonic() - began
        if self._lost_seconds > LOST_SECONDS or MIN_ALL_FAILED <= self.num_scored == self.num_failed:
            self.close()
            raise EngineError(f"{self.failures()} ({self._lost_seconds:.0f} s lost)", f"{_FIX} {self._name}.")
        return 0.0

    def play(self, keys: Sequence[str], policy: Mapping[str, Any], tick: Callable[[int], None]) -> dict[str, Played]:
        """Play an episode of each example against the server of `policy` (rollouts.py). Return the episodes by key.

        An episode that exceeded a time limit is played once more, and an episode with a server error up to _RETRIES
        times more, after a pause. Any other episode that fails scores 0. `tick` gets the number of finished episodes
        every second; an error of `tick` ends the call.

        Raises:
            EngineError: the server keeps failing in an example, or answers nothing for STALL_SECONDS; or too much time
                is lost to a process that dies.
        """
        played: dict[str, Played] = {}
        tries = Counter[str]()  # the machine may have been busy when an episode was late
        width, left = CONCURRENCY, list(keys)
        while left:
            began, pause = time.monotonic(), 0.0
            batch = left if width == CONCURRENCY else left[: width * _FEWER]
            try:
                request = {"play": batch, "policy": {**policy, "concurrency": width, "stall_seconds": STALL_SECONDS}}
                with closing(self._episodes(request, lambda: tick(len(played)))) as episodes:
                    for episode in episodes:
                        began = time.monotonic()
                        cause = clean(episode.failed or "", 300)
                        is_late = cause.startswith("Blocked") or _LATE in cause
                        if tries[episode.key] < (_RETRIES if episode.is_server_fault else is_late):
                            if episode.is_server_fault:
                                pause = _PAUSE_SECONDS
                            tries[episode.key] += 1
                        elif episode.is_server_fault:
                            raise EngineError(f"environment {self._name}: the server fails: {self._shown(cause)}")
                        else:
                            played[episode.key] = episode
                width = CONCURRENCY
            except _Failed as failed:
                self._lost_seconds += time.monotonic() - began
                if self._lost_seconds > LOST_SECONDS:
                    cause = f"environment {self._name}: {self._shown(failed)} ({self._lost_seconds:.0f} s lost)"
                    raise EngineError(cause, f"{_FIX} {self._name}.") from None
                if width == 1:  # the episodes of a batch begin in its order
                    key = next(key for key in batch if key not in played)
                    played[key] = Played(failed=str(failed), key=key)
                width = CONCURRENCY if width == 1 else max(1, width // _FEWER)
            left = [key for key in left if key not in played]
            time.sleep(pause)
        for episode in played.values():
            self.num_scored += 1
            self.num_failed += episode.failed is not None
            self.first_cause = self.first_cause or clean(episode.failed or "", 300)
        return played

    def _episodes(self, request: Mapping[str, Any], tick: Callable[[], None]) -> Generator[Played]:
        """Yield episodes as they end. _Failed if the process dies or does not reply, or if code blocks it too long."""
        reply = self._receive(LOAD_SECONDS, request)
        try:
            while not reply.finished:
                if reply.failed is not None:
                    raise _Failed(clean(reply.failed, 300))
                if reply.blocked is not None:
                    self._lost_seconds += ANSWER_SECONDS
                    if self._lost_seconds > LOST_SECONDS:
                        raise _Failed(clean(f"Blocked: {reply.blocked}", 300))
                if reply.episode:
                    yield reply.episode
                tick()
                reply = self._receive(SILENCE_SECONDS, None)
        except BaseException:
            self.close()  # otherwise the process continues to play
            raise

    def raise_if_all_failed(self) -> None:
        """Raise EngineError if no episode has a score."""
        if self.num_scored == self.num_failed:
            raise EngineError(self.failures(), f"{_FIX} {self._name}.")

    def failures(self) -> str:
        """Return one line about failed rewards; "" if no reward failed."""
        if not self.num_failed:
            return ""
        share = f"{self.num_failed} of {self.num_scored} answers"
        return f"{self._name}: the reward of {share} failed and counts 0; the first: {self._shown(self.first_cause)}"

    def _shown(self, cause: object) -> str:
        return str(cause).partition(":")[0] if self.is_secret else str(cause)

    def close(self) -> None:
        """Kill the process tree. Safe to call twice. EngineError if a process survives SIGKILL."""
        if self._group is not None:
            group, self._group = self._group, None
            self._cpu_before, self._cpu_now = self.cpu_seconds, 0.0
            left = group.stop()
            self._folder.cleanup()
            if left:
                raise EngineError(f"processes of {self._name} could not be killed: {', '.join(left)}")

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nightshift-scorer-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | ({} if self.is_online else _OFFLINE)
        self._group = ProcessGroup("scorer", _GRACE_SECONDS)
        self._child = self._group.start(
            "scorer",
            python_command(str(self._program)),
            log_path=folder / "scorer.log",
            env=python_environment(os.environ, variables),
            cwd=folder,
            stdin=PIPE,
            stdout=PIPE,
        )
        self._pipes = Pipes(self._group, self._child)
        self._ask({"open": self._spec}, "ready", LOAD_SECONDS)
        self._cpu_before -= self._cpu_now  # without the time of loading

    def _ask(self, request: Mapping[str, Any], wanted: str, seconds: float) -> Any:
        """Return the field `wanted` of the reply. _Failed without a reply in time; EngineError if refused."""
        reply = self._receive(seconds, request)
        if (value := getattr(reply, wanted)) is None:
            if "open" in request or reply.failed is None:
                self.close()
            raise _Failed(clean(reply.failed or "an unexpected reply", 300))
        return value

    def _receive(self, seconds: float, request: Mapping[str, Any] | None) -> _Reply:
        """Return the reply to a request; for None the next reply to the last request. _Failed without a reply in time;
        EngineError if the taskset is refused."""
        if self._group is None:
            self._start()
        deadline = time.monotonic() + seconds
        try:
            if request is not None:
                self._pipes.send(json.dumps(request).encode(), deadline)
            reply = parse_json(self._pipes.receive(deadline), _Reply)
        except TimeoutError:
            self.close()
            raise _Failed(f"no reply within {seconds:g} s") from None
        except (OSError, ValueError):
            cause = self._death()
            self.close()
            raise _Failed(cause) from None
        self._cpu_now = reply.cpu_seconds
        if reply.refused is not None:
            self.close()
            raise EngineError(clean(f"environment {self._name}: {reply.refused}"))
        return reply

    def _death(self) -> str:
        """Return why there is no reply."""
        try:
            self._child.wait(_GRACE_SECONDS)
        except TimeoutExpired:
            return "the process sent no reply"
        last = " | ".join(tail(self._child.log_path, 1))
        return f"the process ended: {self._child.exit_cause()}" + (f": {last}" if last else "")
