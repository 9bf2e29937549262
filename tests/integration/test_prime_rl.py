"""The life of a prime-rl run, with stand-ins for prime-rl's programs: real processes, files, ports and HTTP.

prime-rl itself is not run here. Every test asserts that no process is left.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.engines.prime_rl.engine import PrimeRlEngine
from nightshift.engines.prime_rl.session import PrimeRlSession, Timing
from nightshift.engines.prime_rl.weights import latest_stable
from nightshift.errors import EngineError
from nightshift.metrics import read_steps
from nightshift.records import Decoding, Failure, Outcome, Progress, Training
from nightshift.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL
from nightshift.train_toml.config import parse
from tests import stand_in_prime_rl
from tests.conftest import living_children

ROOT = Path(__file__).parents[2]
RULES = replace(GSM8K_PRIME_RL, environments=(replace(ARITHMETIC_TRL.environments[0], num_selection=16, num_train=64),))
TIMING = Timing(startup_seconds=20.0, hang_seconds=3.0, grace_seconds=1.0, poll_seconds=0.05)
BATCH = b"[orchestrator]\nbatch_size = 16\ngroup_size = 4\n"
PROMPTS = [[{"role": "user", "content": f"question {n}"}] for n in range(16)]
DECODING = Decoding(max_completion_tokens=24)

Open = Callable[..., PrimeRlSession]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs with 'quotes'" / "0001" / "run-1"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def engine(tmp_path: Path) -> PrimeRlEngine:
    installation = stand_in_prime_rl.installation(tmp_path, RULES)
    return PrimeRlEngine(RULES, ROOT, dict(os.environ), "none", installation=installation, timing=TIMING)


@pytest.fixture
def start(engine: PrimeRlEngine, run_dir: Path) -> Iterator[Open]:
    """Opens a run with a fault; whatever happens, nothing of it is left."""
    sessions: list[PrimeRlSession] = []

    def open_run(fault: str | None = None, step: int = 2, source: bytes = BATCH, timing: Timing = TIMING):  # type: ignore[no-untyped-def]
        stand_in_prime_rl.misbehave(engine.installation.venv, fault, step)
        engine._timing = timing
        (run_dir.parent / "train.toml").write_bytes(source)
        settings = engine.validate(parse(source)).settings
        sessions.append(engine.open(settings, 1000, run_dir, 120.0))
        return sessions[-1]

    yield open_run
    for session in sessions:
        session.close()
    assert living_children() == []


def train(session: PrimeRlSession, budget_seconds: float = 1.5) -> Training:
    return session.train(budget_seconds, lambda reading: None)


def test_a_run_from_open_to_close(start: Open, run_dir: Path) -> None:
    session = start()
    readings: list[Progress] = []
    training = session.train(2.0, readings.append)
    assert (training.outcome, training.cause, training.failure) == (Outcome.BUDGET, None, None)
    assert training.num_steps >= 3
    assert training.reward_mean == 0.5  # of all rollouts, not of those that the filter left (0.9)
    assert training.peak_memory_gb is None  # no GPU here: not measured
    assert readings[-1].num_steps >= training.num_steps - 1
    steps = read_steps(run_dir / "metrics.jsonl")
    assert [step.step for step in steps] == list(range(1, training.num_steps + 1))
    assert 0 < (steps[0].time or 0) < 2.5
    weights = session.load_final_weights()
    assert weights.step == training.num_steps
    assert session.load_final_weights() == weights
    answers = session.complete(PROMPTS, DECODING, readings.append)
    assert {a.text for a in answers} == {f"weights of step {weights.step}\n#### {weights.step}"}
    session.close()
    session.close()
    assert living_children() == []
    kept = {path.name for path in run_dir.iterdir()}
    assert {"weights", "metrics.jsonl", "rollouts.jsonl", "trainer.log"} <= kept
    assert {path.name for path in (run_dir / "weights").iterdir()} == {
        "config.json", "tokenizer_config.json", "model.safetensors",
    }  # fmt: skip
    assert not (run_dir / "prime-rl" / "broadcasts").exists()
    assert not (run_dir / "prime-rl" / "rollouts").exists()
    rollout = json.loads((run_dir / "rollouts.jsonl").read_text().splitlines()[0])
    assert rollout["problem"].startswith("2 + ")


def test_a_clock_that_is_set_back_takes_no_weights_away(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    session, really = start(), time.time
    training = session.train(1.5, lambda reading: monkeypatch.setattr(time, "time", lambda: really() - 3600))
    monkeypatch.undo()
    assert (training.outcome, training.cause) == (Outcome.BUDGET, None)
    assert session.load_final_weights().step == training.num_steps


def test_weights_that_go_while_the_harness_is_held_up_are_not_missed(
    start: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer deletes step N-2: two steps between the end of the budget and its kill take the weights away."""
    session = start()
    broadcasts, really = session._launch.broadcasts_dir, session._stop

    def stop(*groups: str) -> None:
        chosen = session._final
        while chosen and groups == ("trainer", "rollouts") and chosen.folder.exists():
            time.sleep(0.01)
        really(*groups)

    monkeypatch.setattr(session, "_stop", stop)
    training = train(session)
    assert training.outcome is Outcome.BUDGET
    assert session.load_final_weights().step == training.num_steps
    last = latest_stable(broadcasts)
    assert last is not None
    assert last.step == training.num_steps + 1


def test_max_steps_ends_a_run_before_its_budget(start: Open) -> None:
    session = start(source=b"max_steps = 3\n" + BATCH)
    training = train(session, 60.0)
    assert (training.outcome, training.num_steps) == (Outcome.FINISHED, 3)
    assert session.load_final_weights().step == 3


def test_weights_without_their_marker_do_not_count(start: Open) -> None:
    session = start("no_stable", step=3)
    training = train(session, 2.0)
    assert training.outcome is Outcome.BUDGET
    assert training.num_steps == 2
    assert session.load_final_weights().step == 2
    assert session.complete(PROMPTS[:1], DECODING, lambda reading: None)[0].text.startswith("weights of step 2")


def test_a_server_left_paused_is_resumed(start: Open) -> None:
    session = start("killed_while_paused", step=1, timing=replace(TIMING, hang_seconds=60.0))
    assert train(session, 1.5).outcome is Outcome.BUDGET
    step = session.load_final_weights().step
    assert session.complete(PROMPTS[:1], DECODING, lambda reading: None)[0].text.startswith(f"weights of step {step}")


@pytest.mark.parametrize("fault", ["ignore_sigterm", "grandchild", "slow_start"])
def test_what_is_slow_or_stubborn_is_still_stopped(start: Open, fault: str) -> None:
    session = start(fault)
    assert train(session).outcome is Outcome.BUDGET
    session.close()
    assert living_children() == []


@pytest.mark.parametrize(
    ("fault", "cause", "failure"),
    [
        ("trainer_out_of_memory", "trainer: out of GPU memory", Failure.TRAINING),
        ("trainer_dies", "trainer ended: killed by SIGKILL", Failure.MACHINERY),
        ("trainer_hang", "no step and no rollout for", Failure.MACHINERY),
        ("empty_batches", "all rewards of every group were equal", Failure.TRAINING),
        ("nan", "not a number at step 2", Failure.TRAINING),
        ("server_dies", "inference ended: killed by SIGKILL", Failure.MACHINERY),
    ],
)
def test_a_death_in_training_is_a_crash_with_its_cause(
    start: Open, run_dir: Path, fault: str, cause: str, failure: Failure
) -> None:
    session = start(fault)
    training = train(session, 30.0)
    assert training.outcome is Outcome.CRASHED
    assert cause in (training.cause or "")
    assert training.failure is failure
    assert (training.training_seconds or 0) < 20
    assert training.num_steps == len(read_steps(run_dir / "metrics.jsonl"))
    with pytest.raises(EngineError, match="no final weights"):
        session.load_final_weights()


def test_a_budget_too_short_for_one_step_is_a_crash(start: Open) -> None:
    training = train(start(), 0.02)
    assert training.outcome is Outcome.CRASHED
    assert training.failure is Failure.TRAINING
    assert (training.cause or "").startswith("no step was finished in")


@pytest.mark.parametrize(
    ("fault", "cause", "is_config_fault"),
    [
        ("server_out_of_memory", "inference: no GPU memory is left for the KV cache", True),
        ("server_never_ready", "the inference server was not ready after 2 s", False),
        ("no_model", "was not ready after 2 s", False),
        ("no_first_broadcast", "the first broadcast of weights was not ready after 2 s", False),
        ("loop_never_starts", "the orchestrator's loop was not ready after 2 s", False),
        ("port_taken", "env-server: a port was taken", False),
        ("config_refused", "train.toml:5: trainer.optim.lr = 0.5: prime-rl refuses it", True),
        ("validator_dies", "validator ended: exit code 1: ModuleNotFoundError", False),
    ],
)
def test_a_failed_start_names_the_part(start: Open, fault: str, cause: str, is_config_fault: bool) -> None:
    timing = replace(TIMING, startup_seconds=2.0) if "after 2 s" in cause or "was not ready" in cause else TIMING
    source = BATCH + b"[trainer.optim]\nlr = 0.5\n"
    began = time.monotonic()
    with pytest.raises(EngineError) as caught:
        start(fault, source=source, timing=timing)
    assert cause in str(caught.value)
    assert caught.value.is_config_fault is is_config_fault
    assert time.monotonic() - began < 15
    assert living_children() == []


@pytest.mark.parametrize("fault", ["update_500", "die_on_update"])
def test_a_server_that_cannot_load_the_weights_evaluates_nothing(start: Open, fault: str) -> None:
    """Step 1's weights are never sent by the orchestrator in so short a run, so the fault is met at the end."""
    session = start(fault)
    training = train(session, 0.35)
    if training.outcome is Outcome.BUDGET:
        with pytest.raises(EngineError, match="update_weights"):
            session.load_final_weights()
    else:  # the orchestrator met it first
        assert training.cause


def test_an_adapter_is_served_under_its_own_name(engine: PrimeRlEngine, run_dir: Path) -> None:
    source = BATCH + b"[trainer.model.lora]\nrank = 8\nalpha = 16\n"
    launch = engine.launch(engine.validate(parse(source)).settings, 1000, run_dir)
    assert (launch.base_model_name, launch.served_model) == (RULES.model, "r8-a16.0")


def test_two_runs_side_by_side(tmp_path: Path, engine: PrimeRlEngine) -> None:
    """Two clones on two pairs of GPUs: nothing collides, and each evaluates its own weights."""
    settings = engine.validate(parse(BATCH)).settings
    folders = [tmp_path / clone / "runs" / "0001" / "run-1" for clone in ("one", "two")]
    sessions = []
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            sessions.append(engine.open(settings, 1000, folder, 120.0))
        assert [train(session, 1.0).outcome for session in sessions] == [Outcome.BUDGET] * 2
        steps = [session.load_final_weights().step for session in sessions]
        texts = [s.complete(PROMPTS[:1], DECODING, lambda reading: None)[0].text for s in sessions]
        assert texts == [f"weights of step {step}\n#### {step}" for step in steps]
        assert steps[0] != steps[1]  # the second had trained on while the first was watched
    finally:
        for session in sessions:
            session.close()
    assert living_children() == []
