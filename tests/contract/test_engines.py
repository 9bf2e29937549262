"""What every engine must do: trl with a stand-in worker and with the real one, prime-rl with stand-in programs."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.campaign.metrics import read_steps
from nightshift.campaign.records import Outcome, Phase, Progress
from nightshift.config.rules import Decoding
from nightshift.config.train_toml import parse
from nightshift.engines.base import Engine, NoGradient, scaled_rates
from nightshift.engines.prime_rl import engine as prime_rl
from nightshift.engines.prime_rl.session import Timing
from nightshift.engines.trl.engine import TrlEngine
from nightshift.evaluation.evaluate import examples_of
from tests import stand_in_prime_rl
from tests.conftest import ON_GPU, living_children, slow
from tests.rules import ARITHMETIC_TRL, ROOT
from tests.stand_ins import StandInTrl, prime_rl_rules

SMALL = replace(
    ARITHMETIC_TRL,
    environments=(replace(ARITHMETIC_TRL.environments[0], num_validation=16, num_train=64),),
    startup_seconds=math.inf,
)
BATCH = b"[orchestrator]\nbatch_size = 16\ngroup_size = 4\n[orchestrator.train.sampling]\nmax_completion_tokens = 24\n"
NEVER = math.inf  # no test here is about a limit: what hangs is ended by pytest's own

PROMPT = [{"role": "user", "content": "Ann buys 2 pens. How many?"}]


@pytest.fixture(params=["stand-in", slow("trl"), pytest.param("trl on a GPU", marks=ON_GPU), "prime-rl"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    if request.param != "prime-rl":
        kind = StandInTrl if request.param == "stand-in" else TrlEngine
        return kind(SMALL, ROOT, dict(os.environ), "0" if request.param == "trl on a GPU" else None)
    monkeypatch.setattr(prime_rl, "examine", lambda *arguments: [])  # the stand-in is no installation that passes
    timing = Timing(NEVER, NEVER, grace_seconds=1.0, poll_seconds=0.05)
    monkeypatch.setattr(prime_rl.PrimeRlEngine, "timing", timing)
    installation = stand_in_prime_rl.installation(tmp_path)
    monkeypatch.setattr("nightshift.engines.prime_rl.served.READER", [str(installation.bin_dir / "reader.py")])
    monkeypatch.setattr(prime_rl.PrimeRlEngine, "installation", installation)
    return prime_rl.PrimeRlEngine(prime_rl_rules(), ROOT, dict(os.environ), "none")


@pytest.fixture
def trl_engine() -> Engine:
    return StandInTrl(SMALL, ROOT, dict(os.environ))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "0001"
    path.mkdir(parents=True)
    return path


def settings(engine: Engine, extra: bytes = b"") -> object:
    return engine.validate(parse(extra + BATCH)).settings


def test_a_run_from_open_to_close(engine: Engine, run_dir: Path) -> None:
    """One session pays for the slow start once; each block below is one clause of the protocol."""
    assert engine.check() == []
    readings: list[Progress] = []
    session = engine.open(settings(engine, b"max_steps = 3\n"), 7, run_dir, NEVER)
    try:
        # train: ends with max_steps before the budget, tells steps on the way, writes one metrics line a step
        training = session.train(3600.0, readings.append)
        assert (training.outcome, training.num_steps, training.cause) == (Outcome.FINISHED, 3, None)
        assert training.peak_memory_gb is not None or engine.name == "prime-rl" or isinstance(engine, StandInTrl)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, training.num_steps + 1))
        assert {"time", "reward_mean"} <= rows[0].keys()
        assert {r.phase for r in readings} <= {Phase.TRAINING}
        assert [r.num_steps for r in readings] == sorted(r.num_steps for r in readings)
        # load_final_weights: says which weights, and the file that proves it is there
        weights = session.load_final_weights()
        assert weights.step == training.num_steps
        assert len(weights.sha256) == 64
        # complete: one answer a prompt, in order, the same twice (greedy)
        examples = examples_of("validation", SMALL, ROOT)
        prompts = [environment.episode(example).ask() for environment, example in examples]
        decoding = Decoding(max_completion_tokens=24, batch_size=5)
        once = session.complete(prompts, decoding, readings.append)
        assert len(once) == len(prompts)
        assert all(c.num_tokens <= 24 for c in once)
        assert session.complete(prompts[::-1], decoding, readings.append)[::-1] == once
        written = b"".join(path.read_bytes() for path in run_dir.rglob("*") if path.is_file())
        assert not [prompt for prompt in prompts if prompt[0]["content"].encode() in written]
    finally:
        session.close()
    # close: twice is once, and nothing is left
    session.close()
    assert living_children() == []
    # prove: that the weights that are left were evaluated, where they could be others; an engine that has no session
    notes: list[str] = []
    proof = engine.start_proof(run_dir, weights, notes.append)
    told = proof.result() if proof else None
    assert told is None or told.startswith("served = file: 0.0000 nats a token from the file, 0.")
    assert (told is None) is (notes == []) is (weights.served_sha256 is None)
    assert living_children() == []


def test_a_run_ends_with_its_budget(engine: Engine, run_dir: Path) -> None:
    """On a slow machine with less than a step, which only prime-rl takes for a failure: it has nothing to evaluate."""
    readings: list[Progress] = []
    session = engine.open(settings(engine), 7, run_dir, NEVER)
    try:
        training = session.train(1.0, readings.append)
    finally:
        session.close()
    assert training.outcome is Outcome.BUDGET or (engine.name, training.num_steps) == ("prime-rl", 0)
    assert (training.training_seconds or 0) > 0
    assert readings or training.num_steps == 0
    if engine.name == "trl":  # no update begins after the budget, which is CPU time
        rows = read_steps(run_dir / "metrics.jsonl")
        assert all((row.time or 0) - row.train_seconds < 1.0 for row in rows if row.train_seconds is not None)


def test_a_run_without_a_gradient_ends_at_once_with_its_weights(engine: Engine, run_dir: Path) -> None:
    """NoGradient of a callback ends the training as its budget would, which is never reached here."""
    session = engine.open(settings(engine), 7, run_dir, NEVER)

    def ending(reading: Progress) -> None:
        if reading.num_steps >= 2:
            raise NoGradient("no gradient")

    try:
        training = session.train(3600.0, ending)
        assert (training.outcome, training.cause, training.failure) == (Outcome.NO_GRADIENT, None, None)
        assert training.outcome.is_success
        assert session.load_final_weights().step == training.num_steps >= 2
        assert len(read_steps(run_dir / "metrics.jsonl")) == training.num_steps
        (completion,) = session.complete([PROMPT], Decoding(24), lambda reading: None)
        assert completion.num_tokens > 0
    finally:
        session.close()
    assert living_children() == []


def test_a_dry_run_names_the_command_and_writes_nothing(engine: Engine, run_dir: Path) -> None:
    lines = engine.describe(settings(engine), 7, run_dir)
    assert lines
    assert all("\n" not in line for line in lines)
    assert any(str(run_dir) in line for line in lines)
    assert list(run_dir.iterdir()) == []


def test_keys_without_an_equal_are_named_as_unused(trl_engine: Engine) -> None:
    engine = trl_engine
    config = parse(b"[orchestrator]\nmax_off_policy_steps = 4\n" + BATCH.split(b"\n", 1)[1])
    effective = engine.validate(config)
    assert effective.unused & {*config.values} == {"orchestrator.max_off_policy_steps"}
    assert effective.settings == settings(engine) != settings(engine, b"[trainer.optim]\nlr = 2e-6\n")
    assert json.loads(json.dumps(effective.settings)) == effective.settings
    longer = engine.validate(parse(BATCH.replace(b"= 24", b"= 1024")))  # than the rules allow
    assert longer.settings["max_completion_tokens"] == engine.rules.max_completion_tokens == 64


def test_a_rate_that_the_rules_multiply_is_told_with_its_factor(trl_engine: Engine) -> None:
    end = b"[trainer.scheduler]\ntype = 'linear'\nmin_lr = 2e-7\n"
    config = parse(b"max_steps = 40\n[trainer.optim]\nlr = 3e-6\n" + end + BATCH)
    scale = trl_engine.rules.learning_rate_scale
    assert scale != 1
    assert trl_engine.validate(config).settings["optimizer"]["lr"] == 3e-6 * scale
    assert scaled_rates(config, scale) == (
        f"trainer.optim.lr 3e-6 x {scale:g} = {3e-6 * scale:.6g} on this model".replace("e-0", "e-"),
        f"trainer.scheduler.min_lr 2e-7 x {scale:g} = {2e-7 * scale:.6g} on this model".replace("e-0", "e-"),
    )
