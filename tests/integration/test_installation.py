"""Installing prime-rl from a small stand-in of its repository: real git, a stand-in uv, no network."""

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.train_toml import parse
from nightshift.engines import base, rehearsal
from nightshift.engines.base import PrepareFlags
from nightshift.engines.downloads import model_folder, model_problem
from nightshift.engines.prime_rl import engine as engine_module
from nightshift.engines.prime_rl import install as checks
from nightshift.engines.prime_rl.engine import PrimeRlEngine
from nightshift.engines.prime_rl.install import SUBMODULES, Installation, Pins, install
from nightshift.errors import EngineError
from tests.conftest import ROOT, git, living_children
from tests.integration.conftest import ORG, with_stand_in_uv
from tests.prime_rl_plans import PAIR
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL
from tests.stand_ins import StandInTrl, small

PINS = Pins.read(ROOT / "pyproject.toml")


@dataclass
class Place:
    """A user's home, an upstream in place of github.com, and where prime-rl shall be installed."""

    installation: Installation
    environ: dict[str, str]
    notes: list[str]

    @property
    def root(self) -> Path:
        return self.installation.root

    def install(self, *, has_gpus: bool = True, **environ: str) -> None:
        install(self.installation, {**self.environ, **environ}, self.notes.append, has_gpus=has_gpus)

    def uv_calls(self) -> list[dict[str, object]]:
        log = Path(self.environ["UV_STAND_IN_LOG"])
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def problems(self) -> list[str]:
        found = checks.examine(self.installation, ARITHMETIC_TRL, ROOT, PAIR)
        return [str(check.problem) for check in found if not check.ok]


@pytest.fixture
def place(tmp_path: Path, upstream: tuple[Path, str]) -> Place:
    organisation, commit = upstream[0] / ORG, upstream[1]
    hooks, environ = tmp_path / "hooks", with_stand_in_uv(tmp_path, "ok")
    hooks.mkdir()
    hook = hooks / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\n")
    hook.chmod(0o755)
    (tmp_path / "home" / ".gitconfig").write_text(
        f'[core]\n\thooksPath = {hooks}\n[url "git@github.com:"]\n\tinsteadOf = https://github.com/\n'
    )
    pins = msgspec.structs.replace(PINS, repository=f"file://{organisation}/prime-rl", commit=commit)
    installation = Installation(tmp_path / "cache" / "prime-rl", pins)
    return Place(installation, environ, [])


def tree(folder: Path, without: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and without not in path.parents]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
def test_everything_is_installed_once_and_nothing_else_is_touched(place: Place, tmp_path: Path) -> None:
    before = tree(tmp_path, without=place.root)
    place.install(
        VIRTUAL_ENV="/of/nightshift", UV_PROJECT_ENVIRONMENT="/elsewhere", PYTHONPATH="/x", HTTPS_PROXY="http://proxy"
    )
    assert place.problems() == []
    assert not (place.root / "later.txt").exists()
    assert not (place.root / SUBMODULES[0] / "later.txt").exists()
    [call] = place.uv_calls()
    own_python = ["--managed-python", "--python", "3.12"]  # a system's may lack Python.h
    options = ["--locked", "--inexact", "--no-dev", *own_python, "--extra", "flash-attn"]
    assert call["argv"] == ["sync", "--directory", str(place.root), *options]
    assert call["env"] == {"HTTPS_PROXY": "http://proxy", "GIT_TERMINAL_PROMPT": "0"}
    after = tree(tmp_path, without=place.root)
    assert after.pop("uv.log")  # the stand-in's own
    assert after == before  # the user's git configuration with it; no hook of the user ran
    assert ".nightshift" not in git(place.root, "status", "--porcelain", "--untracked-files=all")
    shown = [" clone ", " checkout --detach ", " submodule update --init ", "$ uv sync "]
    assert [words in note for words, note in zip(shown, place.notes, strict=True)] == [True] * 4
    place.install()  # again: nothing is started
    assert len(place.notes) == 4


@pytest.mark.slow
def test_a_persons_own_checkout_is_completed_in_place_but_not_at_another_commit(place, tmp_path, upstream):
    git(tmp_path, "clone", "--quiet", place.installation.pins.repository, str(place.root))
    head = git(place.root, "rev-parse", "HEAD")
    with pytest.raises(EngineError, match=rf"is at commit {head[:9]}, this version runs .* then run: git -C"):
        place.install()
    assert git(place.root, "rev-parse", "HEAD") == head
    assert place.uv_calls() == []
    git(place.root, "checkout", "--quiet", "--detach", place.installation.pins.commit)
    (place.root / "notes.txt").write_text("mine\n")
    with pytest.raises(EngineError, match=r": deps/verifiers \(submodule\)\. .* submodule update --init"):
        place.install()
    allowed = ["-c", "protocol.file.allow=always", "-c", f"url.{upstream[0].as_uri()}/.insteadOf=git@github.com:"]
    git(place.root, *allowed, "submodule", "update", "--init", "--", *SUBMODULES)
    place.install()
    assert place.problems() == []
    assert (place.root / "notes.txt").read_text() == "mine\n"


@pytest.mark.slow
def test_a_sync_that_fails_is_quoted_and_resumed(place: Place) -> None:
    downloads = "Downloaded package-3 | Downloaded package-4 | Downloaded package-5"
    for mode, words in (("fail", f"exit code 1; its last lines: {downloads} | error"), ("die", "killed by SIGKILL")):
        with pytest.raises(EngineError) as caught:
            place.install(UV_STAND_IN=mode)
        assert words in str(caught.value)
        log_path = Path(str(caught.value).rpartition(" ")[2])
        assert "Downloaded package-0" in log_path.read_text()
        assert any("uv sync did not finish" in problem or "missing" in problem for problem in place.problems())
    place.notes.clear()
    place.install()
    assert [note[:9] for note in place.notes] == ["$ uv sync"]  # the clone is not made again
    assert place.problems() == []
    assert not log_path.exists()


# What is asked of an installation: where it is, what belongs to it, what is wrong with it


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    """An empty folder in place of a checkout."""
    found = Installation(tmp_path / "prime-rl", PINS)
    found.root.mkdir()
    return found


def test_where_prime_rl_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    default = Path("nightshift") / "prime-rl" / PINS.commit
    named = {checks.ENV_VAR: "~/mine", "XDG_CACHE_HOME": "/fast/cache"}
    assert Installation.find(ROOT, {checks.ENV_VAR: ""}).root == tmp_path / ".cache" / default
    assert Installation.find(ROOT, {"XDG_CACHE_HOME": "/fast/cache"}).root == Path("/fast/cache") / default
    assert Installation.find(ROOT, named).root == tmp_path / "mine"


def environment(installation: Installation) -> None:
    """The layout that uv makes."""
    installation.bin_dir.mkdir(parents=True)
    for name in checks.PROGRAMS:
        (installation.bin_dir / name).write_text("#!/bin/sh\n")
        (installation.bin_dir / name).chmod(0o755)
    installation.state_dir.mkdir()
    installation.synced.write_text(PINS.commit)


def package(installation: Installation, name: str, version: str) -> None:
    """A package's own metadata, whatever the name of its folder."""
    folder = installation.bin_dir.parent / "lib/python3.12/site-packages" / f"{name}-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def test_a_change_of_an_environment_makes_another_copy(installation: Installation, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    for name in ("gsm8k", "arithmetic"):
        shutil.copytree(ROOT / "environments" / name, root / "environments" / name)
    folder = installation.environments_dir(root, ARITHMETIC_TRL)
    for _ in range(2):
        installation.copy_environments(root, ARITHMETIC_TRL)
    assert sorted(path.name for path in folder.iterdir()) == ["nightshift_arithmetic", "nightshift_gsm8k"]
    assert not [path for path in folder.rglob("*") if path.is_symlink() or path.suffix == ".pyc"]
    scoring = root / "environments" / "gsm8k" / "nightshift_gsm8k" / "scoring.py"
    scoring.write_bytes(scoring.read_bytes() + b"\n")
    installation.copy_environments(root, ARITHMETIC_TRL)
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted(
        {folder.name, installation.environments_dir(root, ARITHMETIC_TRL).name}
    )


def test_what_math_requires_is_missed_in_prime_rls_environment_with_the_command(installation: Installation) -> None:
    environment(installation)
    rules = rules_of(ROOT, Chosen(environments=["math"]), "prime-rl", 2)
    package(installation, "math_verify", "0.8.0")
    command = f"Run: uv pip install --python {installation.bin_dir / 'python'} math-verify==0.9.0"
    assert str(checks.requirements_problem(installation, rules)).endswith(command)
    package(installation, "math_verify", "0.9.0")
    assert checks.requirements_problem(installation, rules) is None


def test_the_pinned_model_is_where_the_hub_s_client_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, try_to_load_from_cache

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    rules = GSM8K_PRIME_RL
    folder = model_folder(rules, ROOT)
    fix = "Run: uv run prepare.py --engine prime-rl."
    assert str(model_problem(rules, ROOT)) == f"{rules.model} is missing or incomplete in {folder}. {fix}"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    assert model_problem(rules, ROOT) is None
    found = try_to_load_from_cache(rules.model, "model.safetensors", tmp_path, rules.model_revision)
    assert Path(str(found)).samefile(folder / "model.safetensors")


def test_an_engine_checks_as_often_as_it_likes_and_another_one_is_kept_off_its_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "list_gpus", lambda: [*PAIR])
    monkeypatch.setattr(engine_module, "examine", lambda *_: [])
    mine, other = (PrimeRlEngine(GSM8K_PRIME_RL, ROOT, {"XDG_CACHE_HOME": str(tmp_path)}) for _ in range(2))
    assert mine.check() == mine.check() == []
    assert "another experiment of yours uses GPU 0" in other.check()[0]


# prepare.py; test_prove.py has its whole rehearsals


def test_without_gpus_model_and_data_are_fetched_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched, notes = list[str](), list[str]()
    for name in ("prepare_model", "prepare_data"):
        monkeypatch.setattr(engine_module, name, lambda *arguments, name=name: fetched.append(name))
    engine = PrimeRlEngine(GSM8K_PRIME_RL, ROOT, {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, None)
    for smoke in (None, 60.0):  # which fetches nothing
        with pytest.raises(EngineError, match="needs 2 NVIDIA GPUs"):
            engine.prepare(PrepareFlags(smoke=smoke), notes.append)
    assert fetched == ["prepare_model", "prepare_data"]
    assert notes == ["model and data are complete"]


def test_a_rehearsal_without_a_step_is_no_success(tmp_path: Path) -> None:
    """With the other engine's stand-in: rehearsing needs nothing but the protocol."""
    engine = StandInTrl(replace(small(ARITHMETIC_TRL, 16), budget_seconds=0.0), ROOT, dict(os.environ))
    config = parse(b"max_steps = 3\n[orchestrator]\nbatch_size = 16\ngroup_size = 4\n")
    with pytest.raises(EngineError, match=r"arithmetic-trl: no step in 0 s"):
        rehearsal.rehearse(engine, config, tmp_path / "run", lambda line: None)
    assert living_children() == []


def test_the_smoke_config_is_a_valid_one_for_the_tiny_model(tmp_path: Path) -> None:
    rules = rehearsal.smoke_rules(ROOT, GSM8K_PRIME_RL, 60.0)
    engine = PrimeRlEngine(rules, ROOT, {"NIGHTSHIFT_PRIME_RL": str(ROOT / "none")})
    settings = engine.launch(engine.validate(parse(rehearsal._SMOKE_CONFIG)).settings, 1, tmp_path).tree
    model = ROOT / "models" / "arithmetic-base"
    assert settings["model"]["name"] == str(model)
    context = json.loads((model / "config.json").read_bytes())["max_position_embeddings"]
    assert max(settings["seq_len"], settings["inference"]["vllm"]["max_model_len"]) <= context
