"""Which of two files was served, by log-probabilities; and what the server and a worker's folder may contain."""

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
from nightshift.engines.prime_rl.served import CHATS, Answers, ServedProof, Witness, compare
from nightshift.engines.prime_rl.server import Server
from nightshift.engines.prime_rl.weights import check_weights
from nightshift.errors import EngineError
from tests import stand_in_prime_rl
from tests.conftest import living_children
from tests.prime_rl_plans import launch_of, variant
from tests.rules import GSM8K_PRIME_RL, ROOT
from tests.stand_in_server import StandInServer, logprob
from tests.waiting import HANG_SECONDS, Clock

Row = list[float]
LENGTHS = [60 + 5 * index for index in range(len(CHATS))]


def row(draw: Callable[[], float]) -> Row:
    return [draw() for _ in range(sum(LENGTHS))]


def plus(one: Row, other: Row, factor: float = 1.0) -> Row:
    return [a + factor * b for a, b in zip(one, other, strict=True)]


START = row(lambda: random.Random(1).uniform(-6, 0))
NOISE = row(random.Random(2).gauss)


def shifted(size: float, seed: int = 3) -> Row:
    """Weights that have learnt something: other log-probabilities, by `size` nats in the root mean square."""
    return plus(START, row(random.Random(seed).gauss), size)


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.014])
@pytest.mark.parametrize("size", [0.02, 0.1, 1.0])
def test_the_file_that_was_served_is_told_from_the_start_and_a_swap_is_caught(size: float, noise: float) -> None:
    file = shifted(size)
    is_swapped, line = compare([plus(file, NOISE, noise)], START, file)
    assert not is_swapped
    to_file, to_start = map(float, re.findall(r"\d\.\d{4}", line))
    assert line == f"served = file: {to_file:.4f} nats a token from the file, {to_start:.4f} from the start weights"
    assert to_file < to_start
    is_swapped, line = compare([plus(START, NOISE, noise)], START, file)
    assert is_swapped
    assert re.match(r"the server did not serve the file: .* [01]\.\d+ nats a token from the file, 0\.", line)


@pytest.mark.parametrize(("size", "noise"), [(0.0, 0.0), (0.0, 0.014), (1e-4, 0.014)])
def test_two_files_that_are_equally_near_cannot_be_distinguished(size: float, noise: float) -> None:
    for seed in range(50):
        file = shifted(size, seed)
        for served in (file, START):
            _, line = compare([plus(served, row(random.Random(1000 + seed).gauss), noise)], START, file)
            assert line.startswith("served = file: cannot tell: 0.0")
            assert line.endswith("no significant difference")


def test_of_several_engines_the_one_that_had_other_weights_decides() -> None:
    file = shifted(0.1)
    right, stale = plus(file, NOISE, 0.005), plus(START, NOISE, 0.005)
    assert compare([right, right], START, file) == compare([right], START, file)
    for engines in ([right, stale], [stale, right]):
        assert compare(engines, START, file) == compare([stale], START, file)
        assert compare(engines, START, file)[0]


@pytest.fixture
def stand_in() -> Iterator[StandInServer]:
    with StandInServer(GSM8K_PRIME_RL.model, max_model_len=8192) as server:
        server.step = lambda model: 7
        yield server


@pytest.fixture
def witness(stand_in: StandInServer, tmp_path: Path) -> Iterator[Callable[..., Witness]]:
    with ExitStack() as opened:

        def made(rules: Rules = GSM8K_PRIME_RL) -> Witness:
            server = Server(stand_in.port, HANG_SECONDS, Clock())
            opened.callback(server.close)
            return Witness(server, launch_of(variant("train"), tmp_path, rules=rules))

        yield made


def left_in(tmp_path: Path) -> Answers:
    return msgspec.json.decode((tmp_path / "served.json").read_bytes(), type=Answers)


def test_the_server_is_asked_after_the_final_load_and_after_the_scoring(witness, stand_in, tmp_path):
    asked = witness()
    asked.at_end()
    answers = left_in(tmp_path)
    assert answers.problem == ""
    assert answers.engines == [[logprob(token, 7) for tokens in answers.tokens for token in tokens[1:]]]
    asked.confirm()
    bodies = [body for _, body in stand_in.requests]
    assert len(bodies) == len({body["cache_salt"] for body in bodies}) == 2 * len(CHATS)
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
        ({}, {"1": 1}, r"after the scoring are not those after the final load: 0\.0\d+ nats a token apart"),
    ],
)
def test_each_data_parallel_engine_is_asked(witness, stand_in, tmp_path, at_end, later, cause):
    chosen = Chosen(environments=["gsm8k"], infer_gpus=4, train_gpus=2, tensor_parallel=2)
    asked = witness(rules_of(ROOT, chosen, None, 6))
    with pytest.raises(EngineError, match=cause) if cause else nullcontext():
        for lags, question in ((at_end, asked.at_end), (later, asked.confirm)):
            stand_in.lags = lags
            question()
    engines = [body["engine"] for _, body in stand_in.requests]
    assert engines == (len(engines) // 16) * (8 * ["0"] + 8 * ["1"])
    if cause is None:
        assert len(engines) == 2 * 16
        assert len(left_in(tmp_path).engines) == 2


@pytest.mark.parametrize(
    ("fault", "problem", "cause"),
    [
        (None, "", "after the final load: the server answered"),
        ("logprobs_400", "400", None),  # a server that cannot: served = file is "cannot tell"
        ("logprobs_another_token", "no log-probabilities in the server's answer", None),
    ],
)
def test_a_server_that_cannot_tell_ends_no_run_unless_it_could_before(
    witness, stand_in, tmp_path, fault, problem, cause
):
    stand_in.fault, asked = fault, witness()
    asked.at_end()
    answers = left_in(tmp_path)
    assert (answers.engines == []) is bool(fault)
    assert problem in answers.problem
    assert len(answers.problem) <= 300
    stand_in.fault = "logprobs_400"
    with pytest.raises(EngineError, match=cause) if cause else nullcontext():
        asked.confirm()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Proves a run whose server had the weights of its file, those of step 7; nothing is left of it."""
    folder, base = tmp_path / "attempt-0", tmp_path / "base"
    (folder / "weights").mkdir(parents=True)
    base.mkdir()
    save_file({"step": numpy.array([7], dtype=numpy.float32)}, folder / "weights" / "model.safetensors")
    monkeypatch.setattr(proof, "READER", [str(stand_in_prime_rl.install(tmp_path / "prime-rl") / "reader.py")])

    def proven(fault: str | None = None, spoil: Callable[[Path], object] = lambda path: None) -> str:
        stand_in_prime_rl.misbehave(tmp_path / "prime-rl", fault)
        tokens = [[*range(length)] for length in LENGTHS]
        data = msgspec.json.encode(Answers(tokens, [[logprob(token, 7) for row in tokens for token in row[1:]]]))
        (folder / "served.json").write_bytes(data)
        weights = Weights(7, check_weights(folder / "weights"), proof.hashlib.sha256(data).hexdigest())
        spoil(folder)
        return ServedProof(folder, weights, base, dict(os.environ)).result()

    yield proven
    assert living_children() == []


def test_a_child_that_fails_leaves_it_open_and_leaves_nothing(run, monkeypatch):
    line = run("reader_fails")
    assert line.startswith("served = file: cannot tell: the reader ended: exit code 1: ValueError: ")
    assert "\n" not in line
    monkeypatch.setattr(proof, "READ_SECONDS", 0.5)
    assert run("reader_hangs") == "served = file: cannot tell: the reader did not end within 0.5 s"


def swap_weights(folder: Path) -> None:
    save_file({"step": numpy.array([6], dtype=numpy.float32)}, folder / "weights" / "model.safetensors")


@pytest.mark.parametrize(
    "spoil", [swap_weights, lambda folder: (folder / "served.json").unlink()], ids=["weights", "answers"]
)
def test_what_is_not_what_the_worker_left_is_refused(run, spoil):
    with pytest.raises(EngineError, match="was changed after its evaluation: sha256"):
        run(spoil=spoil)
