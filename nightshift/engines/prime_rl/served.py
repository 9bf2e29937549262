"""Served = file: that what was scored came from the weights whose sha256 is recorded.

A hash shows what the server was asked to load, not what it computes with. So a run asks the server for the
log-probabilities of eight fixed chats: of the start weights, after the final load and after the scoring (`Witness`). A
score counts only if the last two agree. Of what is kept or certified, a child computes the same by transformers from
the start weights and from the file (reader.py, `ServedProof`). The served numbers must
be nearer to the file. The test is relative because the two programs round differently: nobody knows yet by how much on
a GPU, and both files are rounded alike.
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
from typing import Annotated

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
# For all chats after the final load, and after the scoring: 2 s measured. At the start, where vLLM may compile for it,
# ADMIN_SECONDS.
ASK_SECONDS = 10.0
# Mean |difference| a token of one server that is asked twice about the same weights. Not measured on a GPU.
SAME = 0.01
# Measured for 0.5B parameters: 42 to 55 s of CPU; on two cores that five to ten other processes want, 99 to 184 s.
READ_SECONDS = 600.0
GRACE_SECONDS = 1.0  # the child saves nothing
# Standard errors over tokens for "nearer": four, not three, because the tokens of a chat share their context. Where
# nothing was learned one keep in 30,000 is a false alarm, which costs a run; were four tokens worth one, one in 50.
SURE = 4.0
# Mean |difference| a token of a server that has the right weights. Measured on a CPU, with random weights of 0.5B
# parameters: transformers in bfloat16 and in float32 differ by 0.023. prime-rl's mismatch KL of about 1e-4 between a
# trainer and a server that agree is that of normal noise of 0.014, whose mean size is 0.011. This is twice the larger.
BOUND = 0.05
MAX_BYTES, MAX_TOKENS = 1 << 20, 512
# Answers as a policy writes them: training moves the log-probabilities of these most.
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
_MESSAGES = [[{"role": "user", "content": ask}, {"role": "assistant", "content": said}] for ask, said in CHATS]

Tokens = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]], msgspec.Meta(max_length=MAX_TOKENS)]
# Of each token but the first. vLLM writes -9999 for an infinite one; rounding may bring one above 0.
Logprobs = Annotated[list[Annotated[float, msgspec.Meta(ge=-1e4, le=0.01)]], msgspec.Meta(max_length=MAX_TOKENS)]


class Answers(msgspec.Struct, frozen=True):
    """What the server says of the chats, in order. `logprobs`: of its first data-parallel engine; `others`: of the
    others."""

    tokens: list[Tokens]
    logprobs: list[Logprobs]
    others: list[list[Logprobs]] = []

    def __post_init__(self) -> None:
        for engine in (self.logprobs, *self.others):
            lengths = [len(logprobs) + 1 for logprobs in engine]
            if len(lengths) != len(CHATS) or [len(tokens) for tokens in self.tokens] != lengths or min(lengths) < 2:
                raise ValueError(f"not {len(CHATS)} lists of tokens with a log-probability for each but the first")

    @property
    def engines(self) -> list[list[float]]:
        """The log-probabilities of all tokens in a row, for each engine."""
        return [[*chain(*engine)] for engine in (self.logprobs, *self.others)]


class Served(msgspec.Struct, frozen=True):
    """`served.json`: under the start weights and under the final ones; `problem`: why one was not had."""

    start: Answers | None = None
    final: Answers | None = None
    problem: str = ""


class Read(msgspec.Struct, frozen=True):
    """What the child says: the log-probabilities under the start weights and under the file."""

    start: list[Logprobs]
    file: list[Logprobs]


class Witness:
    """Asks the server of one run, and writes the answers into the run's folder."""

    def __init__(self, server: Server, launch: Launch) -> None:
        self._server, self._launch = server, launch
        self._served = Served()
        self._sha256: str | None = None
        self._is_confirmed = False

    def at_start(self) -> None:
        """Ask as soon as the server is healthy. Weights that a trainer may have changed do not count as the start."""
        start, problem = self._ask("start", str(self._launch.tree["model"]["name"]), ADMIN_SECONDS)
        if not self._launch.is_adapter and latest_stable(self._launch.broadcasts_dir):  # an adapter has its own name
            start, late = None, "the first step was published before the server answered about its start"
            problem = problem or late
        self._served = Served(start, problem=problem)

    def at_end(self) -> str:
        """Ask after the final load, once; return the sha256 of the file with all answers. EngineError if the engines of
        the server have different weights."""
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

        EngineError unless the answers are those after the final load. A server that gave none then may give none now.
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
            raise EngineError(cause, "See which process of this machine talks to the server, then run it again.")
        self._is_confirmed = True

    def _ask(self, when: str, model: str, seconds: float) -> tuple[Answers | None, str]:
        """Return the answers of the weights served as `model`, or why there are none: that ends no run."""
        num_engines = self._launch.num_engines
        ends = self._server.clock() + seconds * num_engines
        try:
            asked = [
                [self._server.prompt_logprobs(chat, model, ends, engine) for chat in _MESSAGES]
                for engine in (range(num_engines) if num_engines > 1 else [None])
            ]
            first, *others = [[logprobs for _, logprobs in pairs] for pairs in asked]
            answers = {"tokens": [tokens for tokens, _ in asked[0]], "logprobs": first, "others": others}
            return msgspec.convert(answers, Answers), ""
        except (EngineError, msgspec.ValidationError) as error:
            return None, clean(f"{when}: {error}", 300)


def compare(served: Served, read: Read) -> tuple[bool, str]:
    """Return whether the server had the start weights, and a line with its distances from the file and from the start.
    Of several engines the worst one decides.

    Distances are mean |differences| of log-probabilities a token, in nats. ValueError if the child answers other tokens
    than the server.
    """
    final = served.final
    assert final is not None
    file, start = [*chain(*read.file)], [*chain(*read.start)]
    found = []
    for server in final.engines:
        nearer = [abs(s - b) - abs(s - f) for s, f, b in zip(server, file, start, strict=True)]
        margin = SURE * stdev(nearer) / math.sqrt(len(nearer))
        is_chance, is_start = fmean(nearer) <= margin, fmean(nearer) < -margin
        found.append((is_start, is_chance, _distance(server, file), _distance(server, start)))
    is_start, is_chance, to_file, to_start = max(found)
    distances = f"{to_file:.4f} nats a token from the file, {to_start:.4f} from the start weights"
    if is_start:
        return True, f"the server did not serve the file: its log-probabilities are {distances}"
    line = f"served = file: {distances}"
    if is_chance:
        line = f"served = file: cannot tell: {distances}, no further apart than chance"
    elif to_file:
        line += f", {to_start / to_file:.3g} times as far"
    if served.start is not None and served.start.tokens == final.tokens:
        noise = _distance(served.start.engines[0], start)  # of the two programs
        line += f" (server and transformers on the start weights: {noise:.4f})"
    return False, line if to_file <= BOUND else f"{line}; above {BOUND:g}, a bound not yet measured on a GPU"


class ServedProof(Proof):
    """The comparison of what the server showed with what a child computes from the file (reader.py).

    A failure of the comparison itself is "cannot tell", and why.
    """

    def __init__(
        self, run_dir: Path, weights: Weights, base: Path, reader: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        """`base`: the folder of the start weights. EngineError if a file in `run_dir` is not what the worker left."""
        folder = run_dir / WEIGHTS_NAME
        self._served = _read_served(run_dir / SERVED_NAME, weights)
        if (sha256 := check_weights(folder)) != weights.sha256:
            cause = f"{folder} was changed after its evaluation: sha256 {sha256}, recorded is {weights.sha256}"
            raise EngineError(cause)
        self._group, self._child = ProcessGroup("reader", GRACE_SECONDS), None
        self._ends, self._answer = time.monotonic() + READ_SECONDS, run_dir / "reader.json"
        self._problem = self._served.problem or "the server was not asked"
        if self._served.final is None:
            return
        # Threads that spin while they wait: measured, 96 s of CPU instead of 37 on a machine that is shared.
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
        """Return True once the child has ended, or its time has."""
        return self._child is None or self._child.poll() is not None or time.monotonic() >= self._ends

    def result(self) -> str:
        """Return one line. EngineError if the server had the start weights."""
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
        """Return the child's answer. EngineError if it died or hangs, ValueError if it answers something else."""
        if self._child is None:
            raise EngineError(self._problem)
        try:
            self._child.wait(max(0.0, self._ends - time.monotonic()))
        except TimeoutExpired:
            raise EngineError(f"the reader gave no answer within {READ_SECONDS:g} s") from None
        finally:
            if left := self._group.stop():
                name = self._answer.parent.name
                raise EngineError(f"processes of {name} could not be killed: {', '.join(left)}")
        if self._child.returncode:
            raise EngineError(
                ": ".join([f"the reader ended: {self._child.exit_cause()}", *tail(self._child.log_path, 1)])
            )
        return parse_json(read_file(self._answer, MAX_BYTES), Read)


def _read_served(path: Path, weights: Weights) -> Served:
    """Return what the worker wrote, by its hash in the result. EngineError if the file is something else now."""
    if weights.served_sha256 is None:
        return Served(problem="the run has no log-probabilities of its server")
    try:
        data = read_file(path, MAX_BYTES)
        if hashlib.sha256(data).hexdigest() == weights.served_sha256:
            return parse_json(data, Served)
        reason = "it has another sha256"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise EngineError(f"{path} is not what the worker left: {reason}")


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return fmean(abs(a - b) for a, b in zip(one, other, strict=True))
