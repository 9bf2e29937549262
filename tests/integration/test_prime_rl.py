"""The life of a prime-rl run, with stand-ins for prime-rl's programs: real processes, files, ports and HTTP.

prime-rl itself is not run here. Every test asserts that no process is left.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from nightshift.campaign.metrics import read_steps
from nightshift.campaign.records import Outcome, Phase, Progress, Training
from nightshift.config.rules import Decoding, Rules
from nightshift.config.train_toml import parse
from nightshift.engines.prime_rl import server as prime_rl_server
from nightshift.engines.prime_rl.engine import PrimeRlEngine
from nightshift.engines.prime_rl.session import PrimeRlSession, Timing
from nightshift.errors import EngineError, Failure
from tests import stand_in_prime_rl
from tests.conftest import ROOT, living_children, slow
from tests.stand_ins import prime_rl_rules
from tests.waiting import HANG_SECONDS, Clock

RULES = prime_rl_rules()
BATCH = b"[orchestrator]\nbatch_size = 16\ngroup_size = 4\n"
PROMPTS = [[{"role": "user", "content": f"question {n}"}] for n in range(16)]
DECODING = Decoding(max_completion_tokens=24)

Open = Callable[..., PrimeRlSession]
BUDGET_SECONDS = 600.0


@pytest.fixture
def timing(clock: Clock) -> Timing:
    return Timing(startup_seconds=20.0, hang_seconds=3.0, grace_seconds=1.0, poll_seconds=0.05, clock=clock)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs with 'quotes'" / "0001"
    path.mkdir(parents=True)
    return path


def engine_for(rules: Rules, folder: Path) -> PrimeRlEngine:
    engine = PrimeRlEngine(rules, ROOT, dict(os.environ), "none")
    engine.installation = stand_in_prime_rl.installation(folder)
    return engine


@pytest.fixture
def engine(tmp_path: Path) -> PrimeRlEngine:
    return engine_for(RULES, tmp_path)


@pytest.fixture
def start(engine: PrimeRlEngine, run_dir: Path, timing: Timing, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens a run with a fault; whatever happens, nothing of it is left."""
    sessions: list[PrimeRlSession] = []

    def open_run(  # type: ignore[no-untyped-def]
        fault: str | None = None,
        step: int = 2,
        source: bytes = BATCH,
        timing: Timing = timing,
        engine: PrimeRlEngine = engine,
    ):
        stand_in_prime_rl.misbehave(engine.installation.bin_dir.parent, fault, step)
        monkeypatch.setattr(PrimeRlEngine, "timing", timing)
        (run_dir.parent / "train.toml").write_bytes(source)
        settings = engine.validate(parse(source)).settings
        sessions.append(engine.open(settings, 1000, run_dir, math.inf))
        return sessions[-1]

    yield open_run
    for session in sessions:
        session.close()
    assert living_children() == []


@pytest.fixture
def train(clock: Clock) -> Callable[..., Training]:
    """Trains until so many steps are seen: then the budget is over."""

    def until(session: PrimeRlSession, steps: int = 2) -> Training:
        def watch(reading: Progress) -> None:
            if reading.num_steps >= steps:
                clock.now += BUDGET_SECONDS

        return session.train(BUDGET_SECONDS, watch)

    return until


Train = Callable[..., Training]


def test_a_run_from_open_to_close(start: Open, train: Train, run_dir: Path) -> None:
    """What tests/contract does not ask of every engine."""
    session = start()
    training = train(session, 3)
    assert training.reward_mean == 0.5  # of all rollouts, not of those that the filter left (0.9)
    assert training.peak_memory_gb is None  # no GPU here: not measured
    steps = read_steps(run_dir / "metrics.jsonl")
    assert abs(steps[0].time or 0) < 86_400  # from when training began, not from 1970
    weights = session.load_final_weights()
    answers = session.complete(PROMPTS, DECODING, lambda reading: None)
    assert {a.text for a in answers} == {f"weights of step {weights.step}\n#### {weights.step}"}
    readings: list[Progress] = []
    endpoint = session.endpoint(readings.append)
    assert httpx.get(f"{endpoint.base_url}/models").json()["data"][0]["id"] == endpoint.model
    endpoint.tick(7)
    assert (readings[0].num_done, readings[0].phase) == (7, Phase.EVALUATING)
    session.close()
    kept = {path.name for path in run_dir.iterdir()}
    assert {"weights", "metrics.jsonl", "rollouts.jsonl", "trainer.log"} <= kept
    assert {path.name for path in (run_dir / "weights").iterdir()} == {
        "config.json", "tokenizer_config.json", "model.safetensors",
    }  # fmt: skip
    assert not (run_dir / "prime-rl" / "broadcasts").exists()
    assert not (run_dir / "prime-rl" / "rollouts").exists()
    rollout = json.loads((run_dir / "rollouts.jsonl").read_text().splitlines()[0])
    assert rollout["problem"].startswith("2 + ")


@pytest.mark.parametrize(
    ("fault", "cause", "failure"),
    [
        ("trainer_out_of_memory", "trainer: out of GPU memory", Failure.CONFIG),
        slow("trainer_hang", "no step and no rollout for", Failure.INFRASTRUCTURE),
        slow("nan", "NaN or infinite at step 2", Failure.CONFIG),
        # and not "Connection closed", which rank 0 logs
        ("rank_1_raises", "trainer ended: exit code 1: ZeroDivisionError: in rank 1", Failure.UNKNOWN),
        slow("rank_1_stays", "trainer ended: fatal error: ZeroDivisionError: in rank 1", Failure.UNKNOWN),
    ],
)
def test_a_death_in_training_is_a_crash_with_its_cause(start, run_dir, tmp_path, clock, fault, cause, failure):
    session = start(fault, engine=engine_for(replace(RULES, num_gpus=3, train_gpus=2), tmp_path / "two"))

    def tick(reading: Progress) -> None:
        clock.now += 0.1  # hang_seconds are 30 readings without anything new

    training = session.train(math.inf, tick)
    assert training.outcome is Outcome.CRASHED
    assert cause in (training.cause or "")
    assert training.failure is failure
    assert training.num_steps == len(read_steps(run_dir / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("fault", "failure", "cause"),
    [
        ("trainer_hang", Failure.CONFIG, r"no step was finished in \d+ s, but [1-9]\d* rollouts. Lower orchestrator"),
        slow("no_rollout", Failure.INFRASTRUCTURE, r"no rollout was finished in \d+ s. Read env-server.log"),
    ],
)
def test_a_budget_too_short_for_one_step_or_one_rollout_is_a_crash(start, train, fault, failure, cause):
    training = train(start(fault, step=1), 0)
    assert (training.outcome, training.failure) == (Outcome.CRASHED, failure)
    assert re.match(cause, training.cause or "")


def test_a_run_that_max_steps_ended_ends_with_its_last_step(start, clock, timing):
    """Not with the exit of the trainer, which may take twenty seconds."""
    # A reading without news moves the clock, too.
    patient = timing._replace(hang_seconds=math.inf, still_seconds=math.inf)
    session = start("slow_exit", source=b"max_steps = 3\n" + BATCH, timing=patient)

    def tick(reading: Progress) -> None:
        clock.now += 1_000.0  # more than three steps take on any machine

    training = session.train(math.inf, tick)
    assert (training.outcome, training.num_steps, training.cause) == (Outcome.FINISHED, 3, None)


def test_a_server_that_is_never_ready_is_named(start, clock, monkeypatch):
    really = PrimeRlSession._wait_for

    def wait_for(self: PrimeRlSession, problem: str, name: str, is_there: Callable[[], bool]) -> None:
        clock.now += 20.0 * (name == "inference")  # all that comes before it has its time
        really(self, problem, name, is_there)

    monkeypatch.setattr(PrimeRlSession, "_wait_for", wait_for)
    with pytest.raises(
        EngineError, match=r"the inference server was not ready after 20 s; last in its log: "
    ) as caught:
        start("server_never_ready")
    assert caught.value.failure is Failure.INFRASTRUCTURE
    assert living_children() == []


@pytest.mark.slow
def test_on_one_gpu_the_trainer_waits_until_the_server_has_its_memory(engine, start, train, run_dir, monkeypatch):
    planned = engine.launch
    monkeypatch.setattr(engine, "launch", lambda *arguments: replace(planned(*arguments), gpu_ids=(0, 0)))
    begun: list[tuple[str, bool]] = []
    really = PrimeRlSession._start

    def note(self: PrimeRlSession, name: str) -> None:
        begun.append((name, self._server.is_healthy()))
        really(self, name)

    monkeypatch.setattr(PrimeRlSession, "_start", note)
    monkeypatch.setattr(prime_rl_server, "HEALTH_SECONDS", HANG_SECONDS)
    assert train(start("slow_start")).outcome is Outcome.BUDGET
    assert begun == [
        (name, name == "trainer") for name in ("validator", "inference", "env-server", "orchestrator", "trainer")
    ]


def test_two_environments_have_a_server_each_and_a_reward_each(start, tmp_path, run_dir, train):
    first = RULES.environments[0]
    rules = replace(RULES, environments=(first, replace(first, name="gsm8k")))
    assert train(start(engine=engine_for(rules, tmp_path / "two"))).outcome is Outcome.BUDGET
    assert {"env-server-arithmetic.log", "env-server-gsm8k.log"} <= {path.name for path in run_dir.iterdir()}
    assert read_steps(run_dir / "metrics.jsonl")[0].rewards == {"arithmetic": 0.0, "gsm8k": 0.5}
