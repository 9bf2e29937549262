"""The registry of engines: what one is made from, and that nobody else asks for a name."""

import importlib.metadata
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.config.train_toml import load
from nightshift.engines import base
from nightshift.engines.base import PrepareFlags, open_engine
from nightshift.engines.doctor import Doctor, checks
from nightshift.engines.downloads import model_folder
from nightshift.engines.machine import Machine, read_machine
from nightshift.engines.prime_rl.engine import PrimeRlEngine
from nightshift.engines.trl import engine as trl
from nightshift.errors import UsageError
from tests import stand_in_prime_rl
from tests.checkouts import linked_checkout
from tests.conftest import git
from tests.prime_rl_plans import PAIR, SHIPPED
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL, GSM8K_TRL, ROOT
from tests.stand_in_nvml import Card, StandInNvml
from tests.stand_ins import prime_rl_rules


def test_flags_are_the_engine_s_to_refuse() -> None:
    with pytest.raises(UsageError, match=r"'0,1' does not name 1 GPU\(s\)\..*--gpus 0 for --engine trl"):
        open_engine(ARITHMETIC_TRL, ROOT, {}, "0,1")
    with pytest.raises(UsageError, match="--gpus none is for --engine prime-rl"):
        open_engine(ARITHMETIC_TRL, ROOT, {}, "none")
    with pytest.raises(UsageError, match=r"'1' does not name 1 \+ 1 GPU.*--gpus 0,1 .or 0,0. for --engine prime-rl"):
        open_engine(GSM8K_PRIME_RL, ROOT, {}, "1")
    with pytest.raises(UsageError, match=r"--prime-rl there is for --engine prime-rl, these rules \(arithmetic-trl\)"):
        open_engine(ARITHMETIC_TRL, ROOT, {}, prime_rl=Path("there"))
    open_engine(GSM8K_PRIME_RL, ROOT, {}, prime_rl=Path("there"))


@pytest.mark.parametrize(
    ("rules", "gpus", "index"),
    [
        (GSM8K_TRL, None, "0"),
        (GSM8K_TRL, "1", "1"),
        (ARITHMETIC_TRL, "1", "1"),  # the tiny model, on a GPU that is asked for
        (ARITHMETIC_TRL, None, None),
    ],
)
def test_trl_trains_on_the_gpu_that_is_named_as_machine_toml_says(rules, gpus, index, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", StandInNvml([Card(), Card()]))
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr(trl, "TrlSession", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(trl, "model_problem", lambda *arguments: None)  # the model is not on this machine
    root = linked_checkout(tmp_path / "checkout", SHIPPED)
    (root / "machine.toml").write_text(GOOD)
    engine = open_engine(rules, root, {"CUDA_VISIBLE_DEVICES": "0,1"}, gpus)
    engine.open(engine.validate(load(root / "train.toml")).settings, 1, tmp_path, 60.0)
    [(_, _, environment, _, startup_seconds, *_)] = started
    spec = json.loads((tmp_path / "spec.json").read_bytes())
    assert (spec["device"], spec["model"]) == ("cpu" if index is None else "cuda", str(model_folder(rules, root)))
    assert environment["CUDA_VISIBLE_DEVICES"] == (index or "0,1")
    assert (environment["CC"], startup_seconds) == ("/usr/bin/gcc-12", 700.0)
    if index is None:
        assert engine.hardware().startswith("cpu ")
        assert (spec["trained_at_once"], spec["sampled_at_once"]) == (512, 512)
    else:
        assert engine.hardware() == f"1 x {Card.name}"
        assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_versions_are_those_of_what_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_engine(ARITHMETIC_TRL, ROOT, {}).versions()["trl"] == importlib.metadata.version("trl")
    engine = open_engine(GSM8K_PRIME_RL, ROOT, {"NIGHTSHIFT_PRIME_RL": str(tmp_path)})
    assert engine.versions() == {"network": "shared"}
    packages = tmp_path / ".venv" / "lib" / "python3.12" / "site-packages"
    for name in ("torch-2.11.0+cu128", "vllm-0.26.0", "transformers-5.9.0", "torchao-0.15.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
        (packages / f"{name}.dist-info" / "METADATA").write_text("Name: {}\nVersion: {}\n".format(*name.split("-")))
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "prime-rl")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    found = {"torch": "2.11.0+cu128", "vllm": "0.26.0", "transformers": "5.9.0"}
    found |= {"prime-rl": commit, "network": "shared"}
    assert engine.versions() == found
    monkeypatch.setattr(base, "list_gpus", lambda: list(PAIR))
    assert engine.versions() == found | {"driver": "570.86"}


GOOD = """[environment]
CC = "/usr/bin/gcc-12"
NCCL_P2P_DISABLE = "1"
VLLM_USE_FLASHINFER_SAMPLER = "1"
[limits]
startup_seconds = 700
no_step_seconds = 900
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return linked_checkout(tmp_path / "checkout", SHIPPED)


def test_prime_rl_s_processes_get_the_variables_and_a_run_the_limits(root: Path, tmp_path: Path) -> None:
    rules = replace(prime_rl_rules(), startup_seconds=300.0)
    environ = {**os.environ, "NIGHTSHIFT_PRIME_RL": str(stand_in_prime_rl.installation(tmp_path).root)}
    engine = PrimeRlEngine(rules, root, environ, "none")
    plain = engine.launch(engine.validate(load(root / "train.toml")).settings, 1, tmp_path)
    assert (engine.timing.startup_seconds, engine.timing.hang_seconds) == (300.0, 300.0)
    (root / "machine.toml").write_text(GOOD)
    engine = PrimeRlEngine(rules, root, environ, "none")
    launch = engine.launch(engine.validate(load(root / "train.toml")).settings, 1, tmp_path)
    for name, command in launch.commands.items():
        expected = {"CC": "/usr/bin/gcc-12", "NCCL_P2P_DISABLE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "1"}
        assert command.env == {**plain.commands[name].env, **expected}, name
    assert engine.timing[:3] == (700.0, 900.0, 900.0), "to start, without a step, and without any work"
    assert engine.deadline_seconds == rules.deadline_seconds - rules.startup_seconds + 700.0
    engine.rules = replace(rules, startup_seconds=1200.0)
    assert engine.startup_seconds == 1200.0, "a longer limit stays"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[environment]\nPYTHONPATH = '/tmp'", r"machine.toml: \[environment\] may not set PYTHONPATH. Delete it"),
        ("[environment]\nLD_PRELOAD = 'x.so'\nCUDA_VISIBLE_DEVICES = '1'", "may not set LD_PRELOAD, CUDA_VISIBLE_DEV"),
        ("[environment]\nVLLM_LOGGING_LEVEL = 'DEBUG'", "may not set VLLM_LOGGING_LEVEL"),  # it logs prompts
        ("[limits]\nstartup_second = 5", "unknown field `startup_second`"),
        ("[limits", "machine.toml: "),
    ],
)
def test_anything_else_is_refused_in_one_line_before_anything_starts(root: Path, text: str, cause: str) -> None:
    (root / "machine.toml").write_text(text)
    with pytest.raises(UsageError, match=cause) as caught:
        open_engine(ARITHMETIC_TRL, root, {})
    assert "\n" not in str(caught.value)
    found = checks(root, ARITHMETIC_TRL, {}, PrepareFlags())
    assert not Doctor.of(found, ARITHMETIC_TRL).is_ready
    assert [check.name for check in found if not check.ok] == ["machine.toml"]


def test_its_text_is_what_a_record_and_doctor_show(root: Path) -> None:
    assert read_machine(root) == Machine()
    assert read_machine(root).text == ""
    (root / "machine.toml").write_text(f'{GOOD}\n[wandb]\nproject = "mine"\n')
    assert read_machine(root).wandb.project == "mine"  # of no run
    text = read_machine(root).text
    assert text.startswith("CC = /usr/bin/gcc-12, NCCL_P2P_DISABLE = 1, ")
    assert text.endswith(", startup_seconds = 700.0, no_step_seconds = 900.0")
    [check] = [check for check in checks(root, ARITHMETIC_TRL, {}, PrepareFlags()) if check.name == "machine.toml"]
    assert (check.ok, check.detail) == (True, text)


def test_an_engine_under_other_rules_has_the_gpus_of_these_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "list_gpus", lambda: PAIR[:1])
    for first, other in ((ARITHMETIC_TRL, GSM8K_TRL), (GSM8K_TRL, ARITHMETIC_TRL)):
        fresh = open_engine(other, ROOT, {})
        under = open_engine(first, ROOT, {}).under(other)
        assert (under.hardware(), under.gpus_here()) == (fresh.hardware(), fresh.gpus_here())
