"""prepare.py for prime-rl: the real engine, driven through whole rehearsals of stand-ins for prime-rl's programs."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.config.rules import Rules
from nightshift.config.train_toml import parse
from nightshift.engines import rehearsal as preparation
from nightshift.engines.base import PrepareFlags
from nightshift.engines.prime_rl import engine as prime_rl
from nightshift.engines.prime_rl.engine import PrimeRlEngine
from nightshift.engines.prime_rl.install import Installation, Pins
from nightshift.engines.trl.engine import TrlEngine
from nightshift.errors import EngineError
from nightshift.executors.gpus import Gpu
from tests import stand_in_prime_rl
from tests.checkouts import linked_checkout
from tests.conftest import living_children
from tests.prime_rl_plans import PAIR
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL, ROOT
from tests.waiting import HANG_SECONDS

STAND_IN_WORKER = (str(ROOT / "tests" / "stand_in_trainer.py"),)
ENDS = b"max_steps = 3\n"  # so no budget of seconds decides what a rehearsal does
CONFIG = parse(ENDS + b"[orchestrator]\nbatch_size = 16\ngroup_size = 4\n")
SMALL = replace(
    ARITHMETIC_TRL,
    environments=(replace(ARITHMETIC_TRL.environments[0], num_validation=16, num_train=64),),
    budget_seconds=HANG_SECONDS,
)
RULES = replace(SMALL, engine="prime-rl", num_gpus=2, startup_seconds=200.0)


class Prepared:
    """A checkout, an installation of stand-ins in which nothing is missing but what the engine must do itself."""

    def __init__(self, folder: Path) -> None:
        self.root = linked_checkout(folder / "checkout", CONFIG.source)
        self.installation = Installation(folder / "prime-rl", Pins.read(ROOT / "pyproject.toml"))
        (self.installation.state_dir / "base").mkdir(parents=True)
        stand_in_prime_rl.install(self.installation.bin_dir.parent)
        self.environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        self.notes: list[str] = []
        self.opened: list[str] = []

    def misbehave(self, fault: str | None) -> None:
        stand_in_prime_rl.misbehave(self.installation.bin_dir.parent, fault)

    def prepare(self, *, smoke: bool = False) -> None:
        prepared = self

        class Engine(PrimeRlEngine):
            def gpus(self) -> tuple[Gpu, ...]:
                return PAIR

            def under(self, rules: Rules) -> PrimeRlEngine:
                prepared.opened.append(rules.name)
                return super().under(rules)

        reader = [str(self.installation.bin_dir / "reader.py")]
        engine = Engine(RULES, self.root, self.environ, "none", installation=self.installation, reader=reader)
        engine.prepare(PrepareFlags(smoke=60.0 if smoke else None), self.notes.append)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """With rules whose data is generated and whose runs are short."""
    smoke = replace(preparation.smoke_rules(ROOT, RULES, HANG_SECONDS), environments=SMALL.environments)
    monkeypatch.setattr(prime_rl, "install", lambda *arguments, **flags: None)  # has tests of its own
    monkeypatch.setattr(prime_rl, "warm_up_rules", lambda rules: replace(rules, name="warm-up"))
    monkeypatch.setattr(preparation, "smoke_rules", lambda root, rules, seconds: smoke)
    monkeypatch.setattr(preparation, "isolate", lambda rules, root: None)  # not the process of pytest
    monkeypatch.setattr(preparation, "_SMOKE_CONFIG", ENDS + preparation._SMOKE_CONFIG)
    made = Prepared(tmp_path)
    base = made.installation.state_dir / "base"  # without weights: of step 0 to the stand-ins
    monkeypatch.setattr(prime_rl, "model_folder", lambda rules, root: base)
    return made


@pytest.mark.slow
def test_the_caches_are_warmed_and_the_smoke_run_proves_the_chain_and_downloads_nothing(prepared, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise EngineError("no network")

    prepared.prepare()
    assert prepared.opened == ["warm-up"]
    assert "weights of step" in prepared.notes[-1]
    for name in ("prepare_model", "prepare_data"):
        monkeypatch.setattr(prime_rl, name, refuse)
    with pytest.raises(EngineError, match="no network"):
        prepared.prepare()
    prepared.prepare(smoke=True)
    assert prepared.opened == ["warm-up", "smoke"]
    assert prepared.notes[-1].startswith("smoke: ready after")
    assert "weights of step 3 answer; served = file: 0.0000 nats a token from the file" in prepared.notes[-1]
    assert list((prepared.installation.state_dir / "runs").iterdir()) == []  # rehearsals leave nothing
    assert living_children() == []


def test_without_gpus_model_and_data_are_fetched_all_the_same(prepared: Prepared, monkeypatch) -> None:
    fetched: list[str] = []
    for name in ("prepare_model", "prepare_data"):
        monkeypatch.setattr(prime_rl, name, lambda *arguments, name=name: fetched.append(name))
    engine = PrimeRlEngine(RULES, prepared.root, prepared.environ | {"CUDA_VISIBLE_DEVICES": ""}, None)
    with pytest.raises(EngineError, match="needs 2 NVIDIA GPUs"):
        engine.prepare(PrepareFlags(), prepared.notes.append)
    assert fetched == ["prepare_model", "prepare_data"]
    assert prepared.notes == ["model and data are complete"]
    with pytest.raises(EngineError, match="needs 2 NVIDIA GPUs"):
        engine.prepare(PrepareFlags(smoke=60.0), prepared.notes.append)
    assert len(fetched) == 2


def test_a_rehearsal_without_a_step_is_no_success(tmp_path: Path) -> None:
    """With the other engine's stand-in: rehearsing needs nothing but the protocol."""
    rules = replace(SMALL, budget_seconds=0.0)
    engine = TrlEngine(rules, ROOT, dict(os.environ), trainer=STAND_IN_WORKER)
    with pytest.raises(EngineError, match=r"arithmetic-trl: no step in 0 s"):
        preparation.rehearse(engine, CONFIG, tmp_path / "run", lambda line: None)
    assert living_children() == []


def test_the_smoke_config_is_a_valid_one_for_the_tiny_model(tmp_path: Path) -> None:
    rules = preparation.smoke_rules(ROOT, GSM8K_PRIME_RL, 60.0)
    engine = PrimeRlEngine(rules, ROOT, {"NIGHTSHIFT_PRIME_RL": str(ROOT / "none")})
    settings = engine.validate(parse(preparation._SMOKE_CONFIG)).settings
    settings = engine.launch(settings, 1, tmp_path).tree
    assert settings["model"]["name"] == str(ROOT / "models" / "arithmetic-base")
    context = json.loads((ROOT / "models" / "arithmetic-base" / "config.json").read_bytes())["max_position_embeddings"]
    assert settings["seq_len"] <= context
    assert settings["inference"]["vllm"]["max_model_len"] <= context
    assert rules.engine == GSM8K_PRIME_RL.engine
