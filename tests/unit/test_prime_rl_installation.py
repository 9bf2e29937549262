"""What is asked of an installation of prime-rl: where it is, what belongs to it, what is wrong with it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.engines.base import Check
from nightshift.engines.prime_rl import engine as engine_module
from nightshift.engines.prime_rl import install as checks
from nightshift.engines.prime_rl.engine import PrimeRlEngine
from nightshift.engines.prime_rl.install import Installation, Pins
from nightshift.executors.gpus import Gpu
from tests.prime_rl_plans import GPU
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL

ROOT = Path(__file__).parents[2]
PINS = Pins.read(ROOT / "pyproject.toml")


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    """An empty folder in place of a checkout."""
    found = Installation(tmp_path / "prime-rl", PINS)
    found.root.mkdir()
    return found


def test_where_prime_rl_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    default = Path("nightshift") / "prime-rl" / PINS.commit
    named = {checks.ENV_VAR: "~/mine", "XDG_CACHE_HOME": "/fast/cache"}
    assert Installation.find(PINS, {}).root == tmp_path / ".cache" / default
    assert Installation.find(PINS, {"XDG_CACHE_HOME": "/fast/cache"}).root == Path("/fast/cache") / default
    assert Installation.find(PINS, named).root == tmp_path / "mine"
    assert Installation.find(PINS, {checks.ENV_VAR: "here"}).root == tmp_path / "here"
    assert Installation.find(PINS, {checks.ENV_VAR: ""}).root == tmp_path / ".cache" / default


def environment(installation: Installation) -> None:
    """The layout that uv makes."""
    installation.site_packages.mkdir(parents=True)
    installation.bin_dir.mkdir()
    for name in checks.PROGRAMS:
        (installation.bin_dir / name).write_text("#!/bin/sh\n")
        (installation.bin_dir / name).chmod(0o755)
    for name in ("torch-2.11.0+cu128", "vllm-0.26.0+cu129", "flash_attn-2.8.3+cu128torch2.11"):
        package(installation, *name.split("-"))


def package(installation: Installation, name: str, version: str) -> None:
    """A package's own metadata, whatever the name of its folder."""
    folder = installation.site_packages / f"{name}-0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda it: shutil.rmtree(it.venv), "bin/python is missing"),
        (
            lambda it: (it.bin_dir / "python").unlink() or (it.bin_dir / "python").symlink_to("/gone/python3.12"),
            "bin/python is missing",
        ),
        (lambda it: (it.bin_dir / "env-server").unlink(), "env-server is missing"),
        (lambda it: shutil.rmtree(it.site_packages / "torch-0.dist-info"), "torch None, pinned is 2.11.0+cu128"),
        (lambda it: package(it, "vllm", "1"), "vllm 1, pinned"),
        (lambda it: it.state_dir.mkdir() or it.unfinished_sync.touch(), "uv sync did not end well"),
    ],
)
def test_damaged_packages_are_named(installation, damage, words):
    environment(installation)
    assert checks.packages_problem(installation, has_gpus=True) is None
    damage(installation)
    problem = str(checks.packages_problem(installation, has_gpus=True))
    assert words in problem
    assert problem.endswith("Run: uv run prepare.py --engine prime-rl.")
    is_build_of_ones_own = "pinned" in words  # without CUDA, it may have other packages
    assert (checks.packages_problem(installation, has_gpus=False) is None) is is_build_of_ones_own


def clone_of_environments(folder: Path) -> Path:
    for name in ("gsm8k", "arithmetic"):
        shutil.copytree(ROOT / "environments" / name, folder / "environments" / name)
    return folder


def test_a_copy_of_the_environments_is_made_again_after_any_changed_byte(installation, tmp_path):
    root = clone_of_environments(tmp_path / "clone")
    folder = installation.environments_dir(root, ARITHMETIC_TRL)

    def copied() -> dict[str, bytes]:
        return {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()
        }

    installation.copy_environments(root, ARITHMETIC_TRL)
    whole = copied()
    assert sorted(path.name for path in folder.iterdir()) == ["nightshift_arithmetic", "nightshift_gsm8k"]
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    (folder / "nightshift_gsm8k" / "__pycache__").mkdir()
    (folder / "nightshift_gsm8k" / "__pycache__" / "data.cpython-312.pyc").write_bytes(b"compiled on import")
    installation.copy_environments(root, ARITHMETIC_TRL)
    assert len(copied()) == len(whole) + 1, "a whole copy stays"
    scoring = folder / "nightshift_gsm8k" / "scoring.py"
    scoring.write_bytes(scoring.read_bytes().replace(b"0.0", b"1.0"))
    installation.copy_environments(root, ARITHMETIC_TRL)
    assert copied() == whole
    (folder / "nightshift_gsm8k" / "extra.py").write_text("")
    installation.copy_environments(root, ARITHMETIC_TRL)
    assert copied() == whole
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_math_requires_is_missed_in_prime_rls_environment_with_the_command(installation: Installation) -> None:
    environment(installation)
    rules = rules_of(ROOT, Chosen(environments=["math"]), "prime-rl", 2)
    package(installation, "math_verify", "0.8.0")
    command = f"Run: uv pip install --python {installation.bin_dir / 'python'} math-verify==0.9.0"
    assert str(checks.requirements_problem(installation, rules)).endswith(command)
    package(installation, "math_verify", "0.9.0")
    assert checks.requirements_problem(installation, rules) is None


def test_the_pinned_model_is_main_for_whoever_asks_by_name_only(installation: Installation, tmp_path: Path) -> None:
    """Asked through the real huggingface_hub, as vLLM and transformers do."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    rules = GSM8K_PRIME_RL
    source = tmp_path / "users-cache"
    source.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (source / name).write_text("{}")
    assert "is not complete" in str(checks.model_problem(installation, rules))
    for _ in range(2):
        installation.pin_model(rules, source)
    assert checks.model_problem(installation, rules) is None
    found = try_to_load_from_cache(rules.model, "model.safetensors", cache_dir=installation.hub_dir)
    assert Path(found).samefile(source / "model.safetensors")
    offline = snapshot_download(rules.model, cache_dir=installation.hub_dir, local_files_only=True)
    assert Path(offline).samefile(source)
    (installation.model_folder(rules) / "refs" / "main").write_text("0" * 40)
    assert "is not complete" in str(checks.model_problem(installation, rules))
    (source / "model.safetensors").unlink()  # the user empties the cache
    assert "is not complete" in str(checks.model_problem(installation, rules))
    assert checks.model_problem(installation, ARITHMETIC_TRL) is None  # in this repository


def test_caches_are_warm_for_one_kind_of_gpus_and_cold_ones_refuse_no_run(installation: Installation) -> None:
    def warnings(*gpus: Gpu) -> list[Check]:
        checked = checks.guesses(installation, GSM8K_PRIME_RL, ROOT, gpus)
        return [check for check in checked if check.name == "warm caches"]

    [cold] = warnings(GPU, GPU)
    assert f"the compile caches are cold for {GPU.name}: the first start takes longer. Run: uv run" in str(cold)
    assert cold.ok
    installation.warm_mark((GPU, GPU)).parent.mkdir(parents=True)
    installation.warm_mark((GPU, GPU)).write_text("")
    assert warnings(GPU, GPU) == warnings() == []
    assert warnings(GPU, replace(GPU, name="NVIDIA L4"))
    assert warnings(replace(GPU, driver="580.1"), GPU)


def test_an_engine_checks_as_often_as_it_likes_and_another_one_is_kept_off_its_gpus(tmp_path, monkeypatch):
    pair = [GPU, replace(GPU, index=1, uuid="GPU-2")]
    monkeypatch.setattr(engine_module, "list_gpus", lambda: pair)
    monkeypatch.setattr(engine_module, "problems", lambda *_: [])
    mine, other = (PrimeRlEngine(GSM8K_PRIME_RL, ROOT, {"XDG_CACHE_HOME": str(tmp_path)}) for _ in range(2))
    assert mine.check() == mine.check() == []
    assert "GPU 0 is taken by another experiment of yours" in other.check()[0]
