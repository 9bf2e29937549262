"""Served = file: evidence that the scored completions came from the weights whose sha256 is recorded.

A hash shows which weights the server was asked to load, not which weights it uses. So a run asks the server three times
for the log-probabilities of eight fixed chats: at the start, after the final load and after the scoring (`Witness`). A
score counts only if the second and the third answer agree. For kept and certified experiments, a child process computes
the same log-probabilities with transformers, from the start weights and from the file (reader.py, `ServedProof`). The
check fails if the server is significantly nearer to the start weights than to the file. A limit for one distance would
not do: server and transformers round differently, and the size of this error on a GPU has not been measured.
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
# Limit per engine for all chats, after the final load and after the scoring (measured: 2 s). At the start, where vLLM
# may compile, the limit is ADMIN_SECONDS.
ASK_SECONDS = 10.0
# Largest distance (see `compare`) between two answers of servers with the same weights. Not measured on a GPU.
SAME = 0.01
READ_SECONDS = 600.0  # for the child; measured with 0.5B parameters: 42 to 55 s of CPU, 184 s on two busy cores
GRACE_SECONDS = 1.0  # from SIGTERM to SIGKILL: the child saves nothing
# Standard errors (over tokens) by which a distance must be smaller: four, because the tokens of a chat are correlated.
# If training changed nothing, one keep in 30,000 is a false alarm, and its run is repeated.
SURE = 4.0
# Largest expected distance between a server and transformers with the same weights: twice 0.023, the distance between
# transformers in bfloat16 and in float32 on a CPU (random weights of 0.5B parameters).
BOUND = 0.05
MAX_BYTES = 1 << 20  # of served.json and of the child's output
# Questions and answers in the style of a policy: training changes the log-probabilities of such answers most.
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

_MAX_LOGPROB = 0.01  # 0, with room for rounding
Logprobs = list[list[float]]  # by chat and token; the first token has none


class Answers(msgspec.Struct, frozen=True):
    """The token ids of all chats, and their log-probabilities under the weights of a server."""

    tokens: list[list[int]]
    logprobs: Logprobs  # from the first data-parallel engine
    others: list[Logprobs] = []  # from the other engines

    @property
    def engines(self) -> list[list[float]]:
        """The log-probabilities from each engine, those of all chats in one list."""
        return [[*chain(*engine)] for engine in (self.logprobs, *self.others)]


class Served(msgspec.Struct, frozen=True):
    """The contents of `served.json`: answers with the start weights and with the final ones."""

    start: Answers | None = None
    final: Answers | None = None
    problem: str = ""  # why answers are missing


class Read(msgspec.Struct, frozen=True):
    """The output of the child, reader.py: log-probabilities under the start weights and under the file."""

    start: Logprobs
    file: Logprobs


class Witness:
    """Asks the server of a run for the log-probabilities of the chats, and writes them to the run's folder."""

    def __init__(self, server: Server, launch: Launch) -> None:
        self._server, self._launch = server, launch
        self._served = Served()
        self._sha256: str | None = None
        self._is_confirmed = False

    def at_start(self) -> None:
        """Ask about the start weights. Discard the answers if the trainer may have updated the weights meanwhile."""
        start, problem = self._ask("start", str(self._launch.tree["model"]["name"]), ADMIN_SECONDS)
        if not self._launch.is_adapter and latest_stable(self._launch.broadcasts_dir):  # an adapter is another model
            start = None
            problem = problem or "the trainer published new weights before the server answered about the start weights"
        self._served = Served(start, problem=problem)

    def at_end(self) -> str:
        """Ask about the final weights, write served.json, and return its sha256; later calls only return the sha256.
        EngineError if the data-parallel engines of the server have different weights."""
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
        """Ask after the scoring, because any process of the machine can load other weights. Later calls do nothing.
        EngineError if the answers differ from those after the final load, or if one of the two is missing."""
        if self._is_confirmed:
            return
        before, (after, problem) = self._served.final, self._ask("scored", self._launch.served_model, ASK_SECONDS)
        if before is None or after is None:
            if before is not after:
                cause = "the weights before and after the scoring cannot be compared: the server answered only once"
                raise EngineError(f"{cause}: {problem or self._served.problem}", "Run it again.")
        elif before.tokens != after.tokens or (distance := max(map(_distance, before.engines, after.engines))) > SAME:
            why = "different tokens" if before.tokens != after.tokens else f"{distance:.4f} nats a token apart"
            cause = f"the server had other weights after the scoring than after the final load: {why}"
            raise EngineError(cause, "Find out which process of this machine used the server, then run it again.")
        self._is_confirmed = True

    def _ask(self, when: str, model: str, seconds: float) -> tuple[Answers | None, str]:
        """Return the log-probabilities under the weights served as `model`; if the server fails, None and the cause."""
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
        rows = [row for engine in answers for row in engine]
        if any(len(logprobs) != len(tokens) - 1 or max(logprobs) > _MAX_LOGPROB for tokens, logprobs in rows):
            return None, f"{when}: the server gave no valid log-probability for a token"
        return Answers([tokens for tokens, _ in answers[0]], first, others), ""


def compare(served: Served, read: Read) -> tuple[bool, str]:
    """Return whether the server had the start weights, and a line that shows how far it is from them and from the file.

    A distance is the mean |difference| of log-probabilities per token, in nats. Of several engines, the worst
    counts. ValueError if the child and the server have different tokens.
    """
    final = served.final
    assert final is not None
    file, start = [*chain(*read.file)], [*chain(*read.start)]
    results = []
    for server in final.engines:
        differences = [abs(x - s) - abs(x - f) for x, f, s in zip(server, file, start, strict=True)]
        mean, margin = fmean(differences), SURE * stdev(differences) / math.sqrt(len(differences))
        results.append((mean < -margin, mean <= margin, _distance(server, file), _distance(server, start)))
    is_start, is_unclear, to_file, to_start = max(results)
    distances = f"{to_file:.4f} nats a token from the file, {to_start:.4f} from the start weights"
    if is_start:
        return True, f"the server did not serve the file: its log-probabilities are {distances}"
    line = f"served = file: {distances}"
    if is_unclear:
        line = f"served = file: cannot tell: {distances}, no significant difference"
    elif to_file:
        line += f", which is {to_start / to_file:.3g} times as far"
    if served.start is not None and served.start.tokens == final.tokens:
        noise = _distance(served.start.engines[0], start)
        line += f" (server and transformers differ by {noise:.4f} on the start weights)"
    if to_file > BOUND:
        line += f"; the distance from the file is above {BOUND:g}, a limit not yet tested on a GPU"
    return False, line


class ServedProof(Proof):
    """Starts a child (reader.py), and compares its log-probabilities with those of the server.

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
        self._problem = self._served.problem or "the server was not asked about the final weights"
        if self._served.final is None:
            return
        # GOMP_SPINCOUNT: otherwise waiting threads spin, for 96 s of CPU instead of 37 s on a busy machine (measured).
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
        """Return True once the child has ended, or READ_SECONDS are over."""
        return self._child is None or self._child.poll() is not None or time.monotonic() >= self._ends

    def result(self) -> str:
        """Wait for the child. Return the line of `compare` or why there is none. EngineError for the start weights."""
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
        """End the child, and delete its output."""
        self._group.stop()
        self._answer.unlink(missing_ok=True)

    def _read(self) -> Read:
        """Wait for the child. Return its output. EngineError if it fails or hangs, ValueError for invalid output."""
        if self._child is None:
            raise EngineError(self._problem)
        try:
            self._child.wait(max(0.0, self._ends - time.monotonic()))
        except TimeoutExpired:
            raise EngineError(f"the reader did not end within {READ_SECONDS:g} s") from None
        finally:
            if alive := self._group.stop():
                name = self._answer.parent.name
                raise EngineError(f"processes of {name} could not be killed: {', '.join(alive)}")
        if self._child.returncode:
            cause = ": ".join([f"the reader ended: {self._child.exit_cause()}", *tail(self._child.log_path, 1)])
            raise EngineError(cause)
        return parse_json(read_file(self._answer, MAX_BYTES), Read)


def _read_served(path: Path, weights: Weights) -> Served:
    """Read `served.json`. EngineError if its sha256 is not the one that the worker wrote into its result."""
    if weights.served_sha256 is None:
        return Served(problem="the run recorded no log-probabilities of its server")
    try:
        data = read_file(path, MAX_BYTES)
        if hashlib.sha256(data).hexdigest() == weights.served_sha256:
            return parse_json(data, Served)
        reason = "its sha256 differs from that in the result"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise EngineError(f"{path} is not the file that the worker wrote: {reason}")


def _distance(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the mean |difference|, in nats per token."""
    return fmean(abs(a - b) for a, b in zip(first, second, strict=True))
