"""Served = file: the proof that the scored completions came from the weights whose sha256 is recorded.

A hash shows which weights the server was asked to load, not which weights it uses. So a run asks the server for the
log-probabilities of eight fixed chats: with the start weights, after the final load and after the scoring (`Witness`).
A score counts only if the last two agree. For kept and certified experiments, a child process computes the same
log-probabilities by transformers, from the start weights and from the file (reader.py, `ServedProof`). Those of the
server must be nearer to the file. The test is relative because the two programs round differently; the size of this
error on a GPU has not been measured.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from subprocess import TimeoutExpired

import msgspec

from nightshift.campaign.records import WEIGHTS_NAME, Weights
from nightshift.engines.base import Proof
from nightshift.engines.prime_rl.launch import Launch
from nightshift.engines.prime_rl.server import ADMIN_SECONDS, Server
from nightshift.engines.prime_rl.weights import check_weights, latest_stable
from nightshift.errors import EngineError
from nightshift.executors.process import ProcessGroup, python_command, python_environment, tail
from nightshift.files import parse_json, read_file, write_json
from nightshift.text import clean

SERVED_NAME = "served.json"
READER = ("-m", "nightshift.engines.prime_rl.reader")
# Limit for all chats after the final load and after the scoring (measured: 2 s). At the start, where vLLM may compile,
# the limit is ADMIN_SECONDS.
ASK_SECONDS = 10.0
# Largest mean |difference| per token between two answers about the same weights. Not measured on a GPU.
SAME = 0.01
READ_SECONDS = 600.0  # measured for 0.5B parameters: 42 to 55 s of CPU, up to 184 s on two busy cores
GRACE_SECONDS = 1.0  # the child saves nothing
# Standard errors over tokens for "nearer": four, because the tokens of a chat are correlated. If nothing was learned,
# one keep in 30,000 is a false alarm, which costs a run.
SURE = 4.0
# Largest mean |difference| per token between a server and transformers with the same weights: twice 0.023, which
# transformers in bfloat16 and float32 differ by on a CPU (random weights of 0.5B parameters).
BOUND = 0.05
MAX_BYTES = 1 << 20
# Answers in the style of a policy, whose log-probabilities training changes most.
CHATS = (
    ("What is 17 + 26?", "17 + 26 = 43\n#### 43"),
    ("What is 9 * 7 - 5?", "9 * 7 = 63\n63 - 5 = 58\n#### 58"),
    ("Tom has 12 eggs and eats 3. How many are left?", "He has 12 - 3 = 9 eggs left.\n#### 9"),
    ("A pen costs $2 and a book costs $8. What do 3 pens and a book cost?", "3 * 2 = 6\n6 + 8 = 14\n#### 14"),
    ("A train goes 60 miles an hour. How far in 4 hours?", "60 * 4 = 240 miles.\n#### 240"),
    ("Half of the 30 pupils walk. How many do not?", "30 / 2 = 15 walk, so 30 - 15 = 15 do not.\n#### 15"),
    ("Ann reads 20 pages a day. In how many days does she read 140?", "140 / 20 = 7 days.\n#### 7"),
    ("What is 5 + 8 + 13 + 21?", "5 + 8 = 13\n13 + 13 = 26\n26 + 21 = 47\n#### 47"),
)
_MESSAGES = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer in CHATS]

Logprobs = list[list[float]]  # of each chat, of each token but the first


class Answers(msgspec.Struct, frozen=True):
    """The answers of a server to all chats, in order."""

    tokens: list[list[int]]
    logprobs: Logprobs  # of the first data-parallel engine
    others: list[Logprobs] = []  # of the other engines

    @property
    def engines(self) -> list[list[float]]:
        """The log-probabilities of all chats in a row, for each engine."""
        return [[*chain(*engine)] for engine in (self.logprobs, *self.others)]


class Served(msgspec.Struct, frozen=True):
    """The contents of `served.json`: answers with the start weights and with the final ones."""

    start: Answers | None = None
    final: Answers | None = None
    problem: str = ""  # why answers are missing


class Read(msgspec.Struct, frozen=True):
    """The output of the child: log-probabilities under the start weights and under the file."""

    start: Logprobs
    file: Logprobs


class Witness:
    """Asks the server of one run, and writes the answers to the run's folder."""

    def __init__(self, server: Server, launch: Launch) -> None:
        self._server, self._launch = server, launch
        self._served = Served()
        self._sha256: str | None = None
        self._is_confirmed = False

    def at_start(self) -> None:
        """Ask as soon as the server is healthy. Ignore the answers if the trainer may have updated the weights."""
        start, problem = self._ask("start", str(self._launch.tree["model"]["name"]), ADMIN_SECONDS)
        if not self._launch.is_adapter and latest_stable(self._launch.broadcasts_dir):  # an adapter has its own name
            start, late = None, "the first step was published before the server answered about its start weights"
            problem = problem or late
        self._served = Served(start, problem=problem)

    def at_end(self) -> str:
        """Ask after the final load, once. Returns the sha256 of the file with all answers.

        EngineError if the engines of the server have different weights.
        """
        if self._sha256 is None:
            final, problem = self._ask("final", self._launch.served_model, ASK_SECONDS)
            engines = final.engines if final else []
            distance = max((_distance(engines[0], engine) for engine in engines), default=0.0)
            if distance > SAME:
                cause = f"the {len(engines)} engines of the server have different weights after the final load"
                fix = "Run it again; if it repeats, see inference.log in the run's folder."
                raise EngineError(f"{cause}: {distance:.4f} nats a token apart", fix)
            self._served = Served(self._served.start, final, self._served.problem or problem)
            path = self._launch.run_dir / SERVED_NAME
            write_json(path, self._served)
            self._sha256 = hashlib.sha256(read_file(path)).hexdigest()
        return self._sha256

    def confirm(self) -> None:
        """Ask after the scoring, once. Any process of the machine can load other weights into the server.

        EngineError unless the answers equal those after the final load, or are missing both times.
        """
        if self._is_confirmed:
            return
        loaded, (scored, problem) = self._served.final, self._ask("scored", self._launch.served_model, ASK_SECONDS)
        if loaded is None or scored is None:
            if loaded is not scored:
                cause = "only one of two questions about the scored weights was answered"
                raise EngineError(f"{cause}: {problem or self._served.problem}", "Run it again.")
        elif loaded.tokens != scored.tokens or (distance := max(map(_distance, loaded.engines, scored.engines))) > SAME:
            apart = "other tokens" if loaded.tokens != scored.tokens else f"{distance:.4f} nats a token apart"
            cause = f"the server had other weights after the scoring than after the final load: {apart}"
            raise EngineError(cause, "Find out which process of this machine used the server, then run it again.")
        self._is_confirmed = True

    def _ask(self, when: str, model: str, seconds: float) -> tuple[Answers | None, str]:
        """Return the answers of the weights served as `model`, or None and why. A failure does not end the run."""
        num_engines = self._launch.num_engines
        ends = self._server.clock() + seconds * num_engines
        try:
            answers = [
                [self._server.prompt_logprobs(chat, model, ends, engine) for chat in _MESSAGES]
                for engine in (range(num_engines) if num_engines > 1 else [None])
            ]
        except EngineError as error:
            return None, clean(f"{when}: {error}", 300)
        first, *others = [[logprobs for _, logprobs in pairs] for pairs in answers]
        return Answers([tokens for tokens, _ in answers[0]], first, others), ""


def compare(served: Served, read: Read) -> tuple[bool, str]:
    """Return whether the server had the start weights, and a line with its distances from the file and from the start.

    A distance is the mean |difference| of log-probabilities per token, in nats. Of several engines, the worst decides.
    ValueError if the child and the server have different tokens.
    """
    final = served.final
    assert final is not None
    file, start = [*chain(*read.file)], [*chain(*read.start)]
    results = []
    for server in final.engines:
        nearer = [abs(s - b) - abs(s - f) for s, f, b in zip(server, file, start, strict=True)]
        margin = SURE * stdev(nearer) / math.sqrt(len(nearer))
        is_chance, is_start = fmean(nearer) <= margin, fmean(nearer) < -margin
        results.append((is_start, is_chance, _distance(server, file), _distance(server, start)))
    is_start, is_chance, to_file, to_start = max(results)
    distances = f"{to_file:.4f} nats a token from the file, {to_start:.4f} from the start weights"
    if is_start:
        return True, f"the server did not serve the file: its log-probabilities are {distances}"
    line = f"served = file: {distances}"
    if is_chance:
        line = f"served = file: cannot tell: {distances}, no further apart than chance"
    elif to_file:
        line += f", {to_start / to_file:.3g} times as far"
    if served.start is not None and served.start.tokens == final.tokens:
        noise = _distance(served.start.engines[0], start)
        line += f" (server and transformers on the start weights: {noise:.4f})"
    return False, line if to_file <= BOUND else f"{line}; above {BOUND:g}, a bound not yet measured on a GPU"


class ServedProof(Proof):
    """The comparison of the server's log-probabilities with those that a child computes from the file (reader.py).

    If the comparison itself fails, the result is "cannot tell", with the cause.
    """

    def __init__(
        self, run_dir: Path, weights: Weights, base: Path, reader: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        """`base`: the folder of the start weights. EngineError if a file in `run_dir` has changed since the run."""
        folder = run_dir / WEIGHTS_NAME
        self._served = _read_served(run_dir / SERVED_NAME, weights)
        if (sha256 := check_weights(folder)) != weights.sha256:
            raise EngineError(f"{folder} was changed after its evaluation: sha256 {sha256}, not {weights.sha256}")
        self._group, self._child = ProcessGroup("reader", GRACE_SECONDS), None
        self._ends, self._answer = time.monotonic() + READ_SECONDS, run_dir / "reader.json"
        self._problem = self._served.problem or "the server was not asked"
        if self._served.final is None:
            return
        # Without this limit, waiting threads spin: 96 s of CPU instead of 37 s on a busy machine (measured).
        variables = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "5000"}
        paths = (base, folder, run_dir / SERVED_NAME, self._answer)
        try:
            self._child = self._group.start(
                "reader",
                python_command(*reader, *(str(path.absolute()) for path in paths)),
                log_path=run_dir / "reader.log",
                env=python_environment(environ, variables),
                cwd=run_dir,
            )
        except EngineError as error:
            self._problem = str(error)
        except BaseException:
            self.close()
            raise

    def is_over(self) -> bool:
        """Return True once the child has ended, or its time is over."""
        return self._child is None or self._child.poll() is not None or time.monotonic() >= self._ends

    def result(self) -> str:
        """Return a line with the distances, or why there are none. EngineError if the server had the start weights."""
        try:
            is_swapped, line = compare(self._served, self._read())
        except (EngineError, OSError, ValueError) as error:
            return f"served = file: cannot tell: {clean(str(error), 300)}"
        finally:
            self.close()
        if is_swapped:
            raise EngineError(line, "Run it again; if it repeats, see inference.log in the run's folder.")
        return line

    def close(self) -> None:
        """End the child."""
        self._group.stop()
        self._answer.unlink(missing_ok=True)

    def _read(self) -> Read:
        """Return the output of the child. EngineError if the child failed or hangs, ValueError for invalid output."""
        if self._child is None:
            raise EngineError(self._problem)
        try:
            self._child.wait(max(0.0, self._ends - time.monotonic()))
        except TimeoutExpired:
            raise EngineError(f"the reader did not end within {READ_SECONDS:g} s") from None
        finally:
            if left := self._group.stop():
                name = self._answer.parent.name
                raise EngineError(f"processes of {name} could not be killed: {', '.join(left)}")
        if self._child.returncode:
            cause = ": ".join([f"the reader ended: {self._child.exit_cause()}", *tail(self._child.log_path, 1)])
            raise EngineError(cause)
        return parse_json(read_file(self._answer, MAX_BYTES), Read)


def _read_served(path: Path, weights: Weights) -> Served:
    """Read `served.json`. EngineError if the file is not the file that the worker wrote."""
    if weights.served_sha256 is None:
        return Served(problem="the run has no log-probabilities of its server")
    try:
        data = read_file(path, MAX_BYTES)
        if hashlib.sha256(data).hexdigest() == weights.served_sha256:
            return parse_json(data, Served)
        reason = "its sha256 differs from the result"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise EngineError(f"{path} is not the file that the worker wrote: {reason}")


def _distance(first: Sequence[float], second: Sequence[float]) -> float:
    return fmean(abs(a - b) for a, b in zip(first, second, strict=True))
