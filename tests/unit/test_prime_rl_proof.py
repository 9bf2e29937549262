"""Which of two files was served, told from log-probabilities; and what the server and a worker's folder may hold."""

import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import msgspec
import numpy
import pytest
from safetensors.numpy import save_file

from nightshift.campaign.records import Weights
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.engines.prime_rl import served as proof
from nightshift.engines.prime_rl.served import CHATS, Answers, Read, Served, ServedProof, Witness, compare
from nightshift.engines.prime_rl.server import Server
from nightshift.engines.prime_rl.weights import check_weights
from nightshift.errors import EngineError
from tests import stand_in_prime_rl
from tests.conftest import living_children
from tests.prime_rl_plans import launch_of, variant
from tests.rules import GSM8K_PRIME_RL, ROOT
from tests.stand_in_server import StandInServer, logprob
from tests.waiting import HANG_SECONDS, Clock

Rows = list[list[float]]
LENGTHS = [60 + 5 * index for index in range(len(CHATS))]


def rows(draw: Callable[[], float]) -> Rows:
    return [[draw() for _ in range(length)] for length in LENGTHS]


def plus(one: Rows, other: Rows, factor: float = 1.0) -> Rows:
    return [[a + factor * b for a, b in zip(x, y, strict=True)] for x, y in zip(one, other, strict=True)]


def answers(logprobs: Rows) -> Answers:
    return Answers([[1] * (length + 1) for length in LENGTHS], logprobs)


START = rows(lambda: random.Random(1).uniform(-6, 0))
NOISE = rows(random.Random(2).gauss)


def compared(
    said: Rows, file: Rows, start: Rows = START, server_s_start: Rows | None = None, other: Rows | None = None
) -> tuple[bool, str]:
    final = msgspec.structs.replace(answers(said), others=[other] if other else [])
    served = Served(answers(server_s_start) if server_s_start else None, final)
    return compare(served, Read(start, file))


def shifted(size: float, seed: int = 3) -> Rows:
    """Weights that have learnt something: other log-probabilities, by `size` nats in the root mean square."""
    return plus(START, rows(random.Random(seed).gauss), size)


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.014])
@pytest.mark.parametrize("size", [0.02, 0.1, 1.0])
def test_the_file_that_was_served_is_told_from_the_start_and_a_swap_is_caught(size: float, noise: float) -> None:
    file = shifted(size)
    is_swapped, line = compared(plus(file, NOISE, noise), file, server_s_start=plus(START, NOISE, noise))
    assert not is_swapped
    numbers = [float(number) for number in re.findall(r"0\.\d{4}|[1-9]\.\d{4}", line)]
    to_file, to_start, of_programs = numbers
    assert line.startswith(f"served = file: {to_file:.4f} nats a token from the file, {to_start:.4f} from the start")
    assert to_file == of_programs < to_start
    for swapped in (compared(plus(file, NOISE, noise), START, file), compared(plus(START, NOISE, noise), file)):
        assert swapped[0]
        assert re.match(r"the server did not serve the file: .* [01]\.\d+ nats a token from the file, 0\.", swapped[1])


@pytest.mark.parametrize(("size", "noise"), [(0.0, 0.0), (0.0, 0.014), (1e-4, 0.014)])
def test_two_files_that_are_equally_near_are_told_as_such(size: float, noise: float) -> None:
    for seed in range(50):
        file = shifted(size, seed)
        for said in (file, START):
            _, line = compared(plus(said, rows(random.Random(1000 + seed).gauss), noise), file)
            assert line.startswith("served = file: cannot tell: 0.0")
            assert line.endswith("no significant difference")


def test_of_several_engines_the_one_that_had_other_weights_decides() -> None:
    file = shifted(0.1)
    right, stale = plus(file, NOISE, 0.005), plus(START, NOISE, 0.005)
    assert compared(right, file, other=right) == compared(right, file)
    for said, other in ((right, stale), (stale, right)):
        assert compared(said, file, other=other) == compared(stale, file)
        assert compared(said, file, other=other)[0]


# --- the witness -----------------------------------------------------------------------------------------


@pytest.fixture
def stand_in() -> Iterator[StandInServer]:
    with StandInServer(GSM8K_PRIME_RL.model, max_model_len=8192) as server:
        yield server


@pytest.fixture
def witness(stand_in: StandInServer, tmp_path: Path) -> Iterator[Callable[..., Witness]]:
    with ExitStack() as opened:

        def made(
            clock: Callable[[], float],
            name: str = "train",
            deadline: float = HANG_SECONDS,
            rules: Rules = GSM8K_PRIME_RL,
        ) -> Witness:
            server = Server(stand_in.port, deadline, clock)
            opened.callback(server.close)
            return Witness(server, launch_of(variant(name), tmp_path, rules=rules))

        yield made


def served(tmp_path: Path) -> Served:
    return msgspec.json.decode((tmp_path / "served.json").read_bytes(), type=Served)


def asked(witness: Callable[..., Witness], tmp_path: Path) -> Served:
    """What a witness leaves that asks at the start and at the end."""
    told = witness(Clock())
    told.at_start()
    told.at_end()
    return served(tmp_path)


def test_both_are_asked_once_and_left_in_the_folder(witness, stand_in, tmp_path):
    told = witness(Clock())
    told.at_start()
    stand_in.step = lambda model: 7
    sha256 = told.at_end()
    assert told.at_end() == sha256
    left = served(tmp_path)
    assert left.problem == ""
    for found, step in ((left.start, 0), (left.final, 7)):
        assert found.logprobs == [[logprob(token, step) for token in tokens[1:]] for tokens in found.tokens]
    bodies = [body for _, body in stand_in.requests]
    assert len(bodies) == 2 * len(CHATS) == 16
    assert bodies[0]["messages"] == bodies[8]["messages"]
    assert len({body["cache_salt"] for body in bodies}) == 16
    assert (tmp_path / "served.json").stat().st_size < 50_000


@pytest.mark.parametrize(
    ("at_end", "later", "cause"),
    [
        ({}, {}, None),
        (
            {"1": 1},
            {},
            r"the 2 engines of the server have different weights after the final load: 0\.0\d+ nats a token",
        ),
        ({}, {"1": 1}, r"other weights after the scoring than after the final load: 0\.0\d+ nats a token apart"),
    ],
)
def test_each_data_parallel_engine_is_asked(witness, stand_in, tmp_path, at_end, later, cause):
    chosen = Chosen(environments=["gsm8k"], infer_gpus=4, train_gpus=2, tensor_parallel=2)
    told = witness(Clock(), rules=rules_of(ROOT, chosen, None, 6))
    stand_in.step = lambda model: 7
    told.at_start()
    with pytest.raises(EngineError, match=cause) if cause else nullcontext():
        for lags, question in ((at_end, told.at_end), (later, told.confirm)):
            stand_in.lags = lags
            question()
    engines = [body["engine"] for _, body in stand_in.requests]
    assert engines == (len(engines) // 16) * (8 * ["0"] + 8 * ["1"])
    if cause is None:
        assert len(engines) == 3 * 16
        assert len(served(tmp_path).final.engines) == 2


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("logprobs_400", "400"),
        ("logprobs_another_token", "no log-probabilities in the server's answer"),
        ("logprobs_above_0", "the server gave no valid log-probability for a token"),
        ("logprobs_null", "the server gave no valid log-probability for a token"),
    ],
)
def test_a_server_that_tells_nothing_of_use_ends_no_run(witness, stand_in, tmp_path, fault, cause):
    stand_in.fault = fault
    left = asked(witness, tmp_path)
    assert (left.start, left.final) == (None, None)
    assert left.problem.startswith("start: ")
    assert cause in left.problem
    assert len(left.problem) <= 300


@pytest.mark.parametrize(
    ("at_end", "later", "cause"),
    [
        (7, 7, None),
        (7, 8, "other weights after the scoring than after the final load: 0.0"),
        (7, "logprobs_400", "cannot be compared: the server answered only once: scored: "),
        ("logprobs_400", "logprobs_400", None),  # a server that cannot: served = file is "cannot tell"
    ],
)
def test_a_score_counts_if_the_server_had_the_same_weights_after_it(witness, stand_in, at_end, later, cause):
    asked = witness(Clock())
    asked.at_start()
    for answer, question in ((at_end, asked.at_end), (later, asked.confirm)):
        stand_in.fault = answer if isinstance(answer, str) else None
        stand_in.step = lambda model, answer=answer: answer
        if question == asked.confirm and cause is not None:
            with pytest.raises(EngineError, match=cause):
                question()
            return
        question()
    num_requests = len(stand_in.requests)
    asked.confirm()
    assert len(stand_in.requests) == num_requests, "once is enough, and weights of earlier steps may be there by now"


# --- the file and the child ------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Proves a run whose server had the weights of its file, those of step 7; nothing is left of it."""
    folder, base = tmp_path / "attempt-0", tmp_path / "base"
    (folder / "weights").mkdir(parents=True)
    base.mkdir()
    save_file({"step": numpy.array([7], dtype=numpy.float32)}, folder / "weights" / "model.safetensors")
    reader = [str(stand_in_prime_rl.install(tmp_path / "prime-rl") / "reader.py")]

    def proven(fault: str | None = None, spoil: Callable[[Path], object] = lambda path: None) -> str:
        stand_in_prime_rl.misbehave(tmp_path / "prime-rl", fault)
        tokens = [[*range(length)] for length in LENGTHS]

        def told(step: int) -> Answers:
            return Answers(tokens, [[logprob(token, step) for token in row[1:]] for row in tokens])

        data = msgspec.json.encode(Served(told(0), told(7)))
        (folder / "served.json").write_bytes(data)
        weights = Weights(7, check_weights(folder / "weights"), proof.hashlib.sha256(data).hexdigest())
        spoil(folder)
        return ServedProof(folder, weights, base, reader, dict(os.environ)).result()

    yield proven
    assert living_children() == []


@pytest.mark.parametrize(
    ("fault", "cause"), [("reader_fails", "exit code 1: ValueError: "), ("reader_hangs", "did not end within 0.5 s")]
)
def test_a_child_that_fails_leaves_it_open_and_leaves_nothing(run, monkeypatch, fault, cause):
    if fault == "reader_hangs":
        monkeypatch.setattr(proof, "READ_SECONDS", 0.5)
    line = run(fault)
    assert line.startswith("served = file: cannot tell: ")
    assert cause in line
    assert "\n" not in line


def swap_weights(folder: Path) -> None:
    save_file({"step": numpy.array([6], dtype=numpy.float32)}, folder / "weights" / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (swap_weights, "was changed after its evaluation: sha256"),
        (lambda folder: (folder / "served.json").unlink(), "No such file"),
        (lambda folder: (folder / "served.json").write_text("{}"), "its sha256 differs"),
    ],
)
def test_what_is_not_what_the_worker_left_is_refused(run, spoil, cause):
    with pytest.raises(EngineError) as error:
        run(spoil=spoil)
    assert cause in str(error.value)
