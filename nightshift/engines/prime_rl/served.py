"""Served = file: proves that the scored completions came from the weights whose sha256 is recorded.

A run asks the server twice for the log-probabilities of eight fixed chats: after the final load and after the scoring
(`Witness`). A score counts only if both answers agree. For kept and certified experiments, a child process computes the
same log-probabilities with transformers, from the start weights and from the file (reader.py, `ServedProof`). The check
fails if the server is significantly nearer to the start weights than to the file. A limit for one distance would not
do: server and transformers round differently, and the size of this error on a GPU has not been measured.
"""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from subprocess import TimeoutExpired

import msgspec

from nightshift.campaign.records import WEIGHTS_NAME, Weights
from nightshift.engines.prime_rl.launch import Launch
from nightshift.engines.prime_rl.server import Server
from nightshift.engines.prime_rl.weights import check_weights
from nightshift.errors import EngineError
from nightshift.executors.process import ProcessGroup, python_command, python_environment, tail
from nightshift.files import parse_json, read_file, write_json
from nightshift.text import clean

SERVED_NAME = "served.json"
READER = ("-m", "nightshift.engines.prime_rl.reader")
# Largest distance (see `compare`) between two answers of servers with the same weights. Not measured on a GPU.
SAME = 0.01
READ_SECONDS = 600.0  # for the child; measured with 0.5B parameters: 42 to 55 s of CPU, 184 s on two busy cores
SURE = 4.0  # standard errors by which a distance must be smaller: four, because the tokens of a chat are correlated
MAX_BYTES = 1 << 20  # of served.json and of reader.json
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
_REPEATS = "Run it again; if it repeats, see inference.log in the run's folder."


class Answers(msgspec.Struct, frozen=True):
    """The contents of `served.json`: the log-probabilities of the chats, under the final weights of a server."""

    tokens: list[list[int]] = []  # of each chat
    engines: list[list[float]] = []  # by data-parallel engine: all tokens but the first of each chat, in one list
    problem: str = ""  # why answers are missing


class Witness:
    """Asks the server of a run for the log-probabilities of the chats."""

    def __init__(self, server: Server, launch: Launch) -> None:
        self._server, self._launch = server, launch
        self._final = Answers()

    def at_end(self) -> str:
        """Ask about the final weights, write served.json, and return its sha256. EngineError if the data-parallel
        engines of the server have different weights."""
        self._final = self._ask()
        engines = self._final.engines
        if (distance := max((_distance(engines[0], engine) for engine in engines), default=0.0)) > SAME:
            cause = f"the {len(engines)} engines of the server have different weights after the final load"
            raise EngineError(f"{cause}: {distance:.4f} nats a token apart", _REPEATS)
        path = self._launch.run_dir / SERVED_NAME
        write_json(path, self._final)
        return hashlib.sha256(read_file(path)).hexdigest()

    def confirm(self) -> None:
        """Ask after the scoring, because any process of the machine can load other weights.
        EngineError if the answers differ from those after the final load, or if one of the two is missing."""
        before, after = self._final, self._ask()
        why = ""
        if before.tokens != after.tokens:  # one of the two may be missing
            why = after.problem or before.problem or "different tokens"
        elif (distance := max(map(_distance, before.engines, after.engines), default=0.0)) > SAME:
            why = f"{distance:.4f} nats a token apart"
        if why:
            cause = f"the server's weights after the scoring are not those after the final load: {why}"
            raise EngineError(cause, "Find out which process of this machine used the server, then run it again.")

    def _ask(self) -> Answers:
        """Return the log-probabilities under the policy's weights, or the cause if the server fails."""
        num_engines, model = self._launch.num_engines, self._launch.served_model
        chats = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer in CHATS]
        try:
            answers = [
                [self._server.prompt_logprobs(chat, model, engine) for chat in chats]
                for engine in (range(num_engines) if num_engines > 1 else [None])
            ]
        except EngineError as error:
            return Answers(problem=clean(str(error), 300))
        engines = [[*chain.from_iterable(logprobs for _, logprobs in engine)] for engine in answers]
        return Answers([tokens for tokens, _ in answers[0]], engines)


def compare(engines: Sequence[Sequence[float]], start: Sequence[float], file: Sequence[float]) -> tuple[bool, str]:
    """Return whether the server had the start weights, and a line that shows how far it is from them and from the file.

    A distance is the mean |difference| of log-probabilities per token, in nats. ValueError for different tokens.

    Args:
        engines: the log-probabilities from each engine of the server, of which the worst counts.
        start, file: the log-probabilities under the start weights and under those of the file, by transformers.
    """
    results = []
    for server in engines:
        differences = [abs(x - s) - abs(x - f) for x, f, s in zip(server, file, start, strict=True)]
        mean, margin = fmean(differences), SURE * stdev(differences) / math.sqrt(len(differences))
        results.append((mean < -margin, mean <= margin, _distance(server, file), _distance(server, start)))
    is_start, is_unclear, to_file, to_start = max(results)
    distances = f"{to_file:.4f} nats a token from the file, {to_start:.4f} from the start weights"
    if is_start:
        return True, f"the server did not serve the file: its log-probabilities are {distances}"
    if is_unclear:
        return False, f"served = file: cannot tell: {distances}, no significant difference"
    return False, f"served = file: {distances}"


class ServedProof:
    """Compares the log-probabilities of a child (reader.py) with those of the server."""

    def __init__(self, run_dir: Path, weights: Weights, base: Path, environ: Mapping[str, str]) -> None:
        """`base`: the folder of the start weights. EngineError if a file in `run_dir` has changed since the run."""
        folder, path = run_dir / WEIGHTS_NAME, run_dir / SERVED_NAME
        data = b""
        with suppress(OSError):
            data = read_file(path, MAX_BYTES)
        for changed, sha256, recorded in (
            (path, hashlib.sha256(data).hexdigest(), weights.served_sha256),
            (folder, check_weights(folder), weights.sha256),
        ):
            if sha256 != recorded:
                raise EngineError(f"{changed} was changed after its evaluation: sha256 {sha256}, not {recorded}")
        self._served = parse_json(data, Answers)
        self._group, self._child = ProcessGroup("reader", grace_seconds=1.0), None
        self._ends, self._answer = time.monotonic() + READ_SECONDS, run_dir / "reader.json"
        if not self._served.engines:
            return
        # GOMP_SPINCOUNT: otherwise waiting threads spin, for 96 s of CPU instead of 37 s on a busy machine (measured).
        variables = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "5000"}
        command = python_command(*READER, *(str(name.absolute()) for name in (base, folder, path, self._answer)))
        log_path, env = run_dir / "reader.log", python_environment(environ, variables)
        try:
            self._child = self._group.start("reader", command, log_path=log_path, env=env, cwd=run_dir)
        except BaseException:
            self.close()
            raise

    def is_over(self) -> bool:
        """Return whether `result` returns at once: the child has ended, or READ_SECONDS are over."""
        return self._child is None or self._child.poll() is not None or time.monotonic() >= self._ends

    def result(self) -> str:
        """Wait for the child. Return the line of `compare` or why there is none. EngineError for the start weights."""
        try:
            if self._child is None:
                raise EngineError(self._served.problem)
            self._child.wait(max(0.0, self._ends - time.monotonic()))
            if self._child.returncode != 0:
                words = ["the reader ended", self._child.exit_cause(), *tail(self._child.log_path, 1)]
                raise EngineError(": ".join(words))
            answer = parse_json(read_file(self._answer, MAX_BYTES), dict[str, list[float]])
            is_start, line = compare(self._served.engines, **answer)
        except TimeoutExpired:
            return f"served = file: cannot tell: the reader did not end within {READ_SECONDS:g} s"
        except (EngineError, OSError, ValueError) as error:
            return f"served = file: cannot tell: {clean(str(error), 300)}"
        finally:
            self.close()
        if is_start:
            raise EngineError(line, _REPEATS)
        return line

    def close(self) -> None:
        """End the child, and delete its output. You may call it twice."""
        self._group.stop()
        self._answer.unlink(missing_ok=True)


def _distance(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the mean |difference|, in nats per token."""
    return fmean(abs(a - b) for a, b in zip(first, second, strict=True))
