"""The registry of engines: what one is made from, and that nobody else asks for a name."""

import ast
import importlib.metadata
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.config.train_toml import load
from nightshift.engines.base import ENGINES, PrepareFlags, open_engine
from nightshift.engines.prime_rl import engine as prime_rl
from nightshift.errors import UsageError
from tests.conftest import git
from tests.prime_rl_plans import PAIR
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL, GSM8K_TRL
from tests.unit.test_gpus import CARDS, StandInNvml

ROOT = Path(__file__).parents[2]


def test_flags_are_the_engine_s_to_refuse() -> None:
    with pytest.raises(UsageError, match=r"'0,1' is no GPU id.*--gpus 0 for --engine trl"):
        open_engine(ARITHMETIC_TRL, ROOT, {}, "0,1")
    with pytest.raises(UsageError, match="--gpus none is for --engine prime-rl"):
        open_engine(ARITHMETIC_TRL, ROOT, {}, "none")
    with pytest.raises(UsageError, match=r"'1' is no pair of GPU ids.*--gpus 0,1 .or 0,0. for --engine prime-rl"):
        open_engine(GSM8K_PRIME_RL, ROOT, {}, "1")
    with pytest.raises(UsageError, match=r"--prime-rl there is for --engine prime-rl, these rules \(arithmetic-trl\)"):
        open_engine(ARITHMETIC_TRL, ROOT, {}, prime_rl=Path("there"))
    open_engine(GSM8K_PRIME_RL, ROOT, {}, prime_rl=Path("there"))
    with pytest.raises(UsageError, match="--smoke is for --engine prime-rl"):
        open_engine(ARITHMETIC_TRL, ROOT, {}).prepare(PrepareFlags(smoke=60.0), print)


@pytest.mark.parametrize(
    ("rules", "gpus", "index", "model"),
    [
        (GSM8K_TRL, None, "0", GSM8K_TRL.model),
        (GSM8K_TRL, "1", "1", GSM8K_TRL.model),
        (ARITHMETIC_TRL, "1", "1", str(ROOT / ARITHMETIC_TRL.model)),  # the tiny model, on a GPU that is asked for
        (ARITHMETIC_TRL, None, None, str(ROOT / ARITHMETIC_TRL.model)),
    ],
)
def test_trl_trains_on_the_gpu_that_is_named(rules, gpus, index, model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", StandInNvml([replace(CARDS["H100"]), replace(CARDS["RTX 4090"])]))
    started: list[dict[str, str]] = []

    class Session:
        def __init__(self, trainer: Path, run_dir: Path, environment: dict[str, str], *more: object) -> None:
            started.append(environment)

    monkeypatch.setattr("nightshift.engines.trl.engine.TrlSession", Session)
    engine = open_engine(rules, ROOT, {"CUDA_VISIBLE_DEVICES": "0,1"}, gpus)
    engine.open(engine.validate(load(ROOT / "train.toml")).settings, 1, tmp_path, 60.0)
    spec = json.loads((tmp_path / "spec.json").read_bytes())
    assert (spec["device"], spec["model"]) == ("cpu" if index is None else "cuda", model)
    assert started[0]["CUDA_VISIBLE_DEVICES"] == (index or "0,1")
    if index is None:
        assert engine.hardware().startswith("cpu ")
        assert (spec["trained_at_once"], spec["sampled_at_once"]) == (512, 512)
    else:
        assert engine.hardware() == f"1 x {list(CARDS.values())[0 if index == '1' else 3].name}"
        assert started[0]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_one_engine_does_not_load_the_other() -> None:
    code = (
        "import sys; from pathlib import Path; from nightshift.config import rules_toml; "
        "from nightshift.engines import base; "
        "cheap = 'torch' not in sys.modules; rules = rules_toml.rules_here(Path(), 'trl', 0); "
        "base.open_engine(rules, Path(), {}); print(cheap, 'httpx' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "False"]


def test_nothing_outside_asks_for_an_engine_by_its_name() -> None:
    for path in (ROOT / "nightshift").rglob("*.py"):
        if "engines" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                values = [value.value for value in ast.walk(node) if isinstance(value, ast.Constant)]
                assert not set(ENGINES) & set(values), f"{path}:{node.lineno}"


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
    found = {
        "torch": "2.11.0+cu128",
        "vllm": "0.26.0",
        "transformers": "5.9.0",
        "prime-rl": commit,
        "network": "shared",
    }
    assert engine.versions() == found
    monkeypatch.setattr(prime_rl, "list_gpus", lambda: list(PAIR))
    assert engine.versions() == found | {"driver": "570.86"}
