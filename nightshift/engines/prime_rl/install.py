"""prime-rl's installation: clone it, sync its packages, check that it is what pyproject.toml pins.

An installation is prime-rl's own checkout with its own environment in `.venv`. All that Nightshift adds is in one
folder of the checkout, `.nightshift`: compile caches and copies of environments.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import time
import tomllib
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from nightshift.campaign.git import Repo
from nightshift.campaign.records import MODELS_GB
from nightshift.config.rules import RULES_NAME, TASKSET_FOLDERS, Rules
from nightshift.engines.base import Check, Note
from nightshift.engines.downloads import data_problem, model_folder, model_problem
from nightshift.engines.prime_rl.config import context_tokens
from nightshift.errors import EngineError
from nightshift.evaluation.environment import CURVE_STEPS
from nightshift.evaluation.environment import load as load_environments
from nightshift.executors.gpus import Gpu
from nightshift.executors.process import ProcessGroup, tail
from nightshift.files import cache_dir, disk_error, free_disk_gb, parse_json, read_file
from nightshift.waiting import waiting

ENGINE = "prime-rl"
ENV_VAR = "NIGHTSHIFT_PRIME_RL"
PREPARE = "Run: uv run prepare.py --engine prime-rl."
# The fifth submodule, prime-kernels, is for other models.
SUBMODULES = ("deps/verifiers", "deps/renderers", "deps/prime-envs", "deps/pydantic-config")
PROGRAMS = ("python", "inference", "env-server", "orchestrator", "torchrun")
# One run: three broadcasts at once of 1.3 GB (494 M parameters in bf16, the tied head of 136 M once more), the kept
# model, traces, logs.
RUN_DISK_GB = 6.0
BROADCAST_GB = 1.3
_SHM, _SHM_GB = Path("/dev/shm"), 0.5  # runs on a CPU left segments of 168 MB there; a container has 64 MB by default
_GRACE_SECONDS = 5.0  # git and uv clean up after themselves on SIGTERM
_POLL_SECONDS = 0.5
_NUM_QUOTED_LINES = 4
_FOREIGN = ("VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT", "UV_PROJECT_ENVIRONMENT")  # of other projects
_TRAINING = """from nightshift_gsm8k.harness import ChatHarness
from nightshift_taskset.training import training_set

__all__ = ["ChatHarness", "TrainingEnv", "TrainingSet"]
"""


@dataclass(frozen=True, slots=True)
class Pins:
    """`[tool.nightshift.prime-rl]` of pyproject.toml."""

    repository: str
    commit: str
    python: str
    torch: str
    vllm: str
    flash_attn: str

    @classmethod
    def read(cls, pyproject: Path) -> Pins:
        """Read the pins of this version of Nightshift."""
        table = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["nightshift"]["prime-rl"]
        return cls(**{name: table[name.replace("_", "-")] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Installation:
    """prime-rl's checkout at `root` (absolute), which may not exist."""

    root: Path
    pins: Pins

    @classmethod
    def find(cls, checkout: Path, environ: Mapping[str, str]) -> Installation:
        """Return what a checkout of Nightshift pins, in the folder that NIGHTSHIFT_PRIME_RL names, else in the user's
        cache."""
        pins = Pins.read(checkout / "pyproject.toml")
        default = cache_dir(environ) / "prime-rl" / pins.commit
        return cls(Path(environ.get(ENV_VAR) or default).expanduser().absolute(), pins)

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def bin_dir(self) -> Path:
        """prime-rl's programs, which start each other by bare name: this folder comes first on their PATH."""
        return self.venv / "bin"

    @property
    def site_packages(self) -> Path:
        return self.venv / "lib" / f"python{self.pins.python}" / "site-packages"

    @property
    def state_dir(self) -> Path:
        """Everything that Nightshift adds to the checkout."""
        return self.root / ".nightshift"

    @property
    def unfinished_sync(self) -> Path:
        """Exists while packages are being installed, and after an installation that was interrupted."""
        return self.state_dir / "sync.unfinished"

    def environments_dir(self, root: Path, rules: Rules) -> Path:
        """The copy of the rules' environments in the Nightshift checkout at `root`, named by their bytes.

        The copy goes on PYTHONPATH, so checkouts with different environments share an installation.
        """
        return self.state_dir / "environments" / environments_hash(environment_files(root, rules))

    def copy_environments(self, root: Path, rules: Rules) -> None:
        """Copy the environments unless the copy is whole; never link to files that may change."""
        target, files = self.environments_dir(root, rules), environment_files(root, rules)
        if environments_hash(files_of([*target.glob("*")])) == target.name:
            return
        temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
        for name, data in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(data)
        shutil.rmtree(target, ignore_errors=True)
        temporary.replace(target)

    def environment(self, root: Path, rules: Rules, path: str) -> dict[str, str]:
        """Return the variables that make a process use this installation; `path` is the caller's PATH."""
        caches = self.state_dir / "caches"
        return {
            "PATH": f"{self.bin_dir}{os.pathsep}{path}",
            "VIRTUAL_ENV": str(self.venv),
            "PYTHONPATH": str(self.environments_dir(root, rules)),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
        }

    def version(self, package: str) -> str | None:
        """Return the installed version of a package by the package's own metadata; None if it is not installed."""
        packages = metadata.distributions(name=package, path=[str(self.site_packages)])
        return next((package.version for package in packages), None)

    def versions(self) -> dict[str, str]:
        """Return the commit of the checkout and the versions of its packages, without those that are missing."""
        found = {name: self.version(name) for name in ("torch", "vllm", "transformers")}
        with suppress(EngineError):
            found["prime-rl"] = Repo(self.root).head().commit
        return {name: version for name, version in found.items() if version is not None}


def environment_files(root: Path, rules: Rules) -> dict[str, bytes]:
    """Return the packages that runs need on PYTHONPATH, without compiled files: the bytes of each file by its name.

    prime-rl gets the training set of a taskset of others by a package that is written here.
    """
    folders = {folder for one in rules.environments for folder in (TASKSET_FOLDERS if one.taskset else one.folders)}
    packages = [path.parent for folder in folders for path in (root / folder).glob("*/__init__.py")]
    packages += [root / loss.folder for loss in rules.losses]
    written = {}
    for one in rules.environments:
        if one.taskset is not None:
            packages.append(one.taskset.place(root))
            packages += [path.parent for beside in one.taskset.beside(root) for path in beside.glob("*/__init__.py")]
            named = {name: getattr(one, name) for name in ("args", "num_validation", "num_train")}
            spec = asdict(one.taskset) | named
            text = f"{_TRAINING}TrainingSet, TrainingEnv = training_set({spec!r})\n"
            written[f"{one.package}/__init__.py"] = text.encode()
    return files_of(packages) | written


def environments_hash(files: Mapping[str, bytes]) -> str:
    """Return 16 hex digits over the names and bytes of files."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:16]


def files_of(packages: Sequence[Path]) -> dict[str, bytes]:
    """Return the bytes of the packages' files by name."""
    return {
        path.relative_to(package.parent).as_posix(): path.read_bytes()
        for package in packages
        for path in (package.rglob("*") if package.is_dir() else [package])
        if path.is_file() and path.suffix != ".pyc"
    }


def install(installation: Installation, environ: Mapping[str, str], note: Note, *, has_gpus: bool) -> None:
    """Clone, sync and check what is missing; each command is shown. Repeating it resumes.

    Args:
        environ: the user's own environment: it contains proxies, mirrors and certificates.
        has_gpus: False for an environment of the user's own, without CUDA, whose packages are left alone.

    Raises:
        EngineError: a command that failed, or a part that is not what is pinned.
    """
    root, pins = installation.root, installation.pins
    clone = root.with_name(f"{root.name}.clone")  # is renamed when it is complete
    log_path = root.with_name(f"{root.name}.install.log")  # exists until the installation is complete
    run = partial(_run, environ, log_path, note)
    try:
        if not root.exists() or not any(root.iterdir()):
            shutil.rmtree(clone, ignore_errors=True)
            clone.parent.mkdir(parents=True, exist_ok=True)
            # .gitmodules has SSH addresses. With all history: verifiers reads its own version from git's tags.
            https = f"url.{pins.repository.rsplit('/', 2)[0]}/.insteadOf=git@github.com:"
            git = ("git", "-c", "core.hooksPath=/dev/null", "-c", https)
            run(*git, "clone", "--progress", "--no-checkout", pins.repository, clone)
            run(*git, "-C", clone, "checkout", "--detach", pins.commit)
            run(*git, "-C", clone, "submodule", "update", "--init", "--recursive", "--", *SUBMODULES)
            # Fills the indexes' times, without which every later check reads all files: 0.8 s instead of 0.01 s.
            run("git", "-C", clone, "status", "--short")
            clone.replace(root)
        if problem := checkout_problem(installation):  # a checkout of the user's is not changed
            raise problem
        if not installation.state_dir.exists():
            installation.state_dir.mkdir()
            (installation.state_dir / ".gitignore").write_text("*\n")
        problem = packages_problem(installation, has_gpus=has_gpus)
        if problem and has_gpus:
            installation.unfinished_sync.touch()
            # uv's own Python has the headers with which Triton compiles; a system's often lacks them (vllm issue
            # 27890). --inexact leaves what somebody installed beside prime-rl's packages.
            python = ("--managed-python", "--python", pins.python)
            options = ("--locked", "--inexact", "--no-dev", *python, "--extra", "flash-attn")
            run("uv", "sync", "--directory", root, *options)
            installation.unfinished_sync.unlink()
            problem = packages_problem(installation, has_gpus=has_gpus)
    except OSError as error:
        raise disk_error(error, root) from None
    if problem:
        fix = problem.fix if has_gpus else "Build prime-rl's environment there yourself, without CUDA (--gpus none)."
        raise EngineError(problem.cause, fix)
    log_path.unlink(missing_ok=True)


def _run(environ: Mapping[str, str], log_path: Path, note: Note, *argv: str | Path) -> None:
    """Show a command and run it to its end. EngineError with the last lines of its log if it fails."""
    command = shlex.join(map(str, argv))
    note(f"$ {command}")
    env = {name: value for name, value in environ.items() if name not in _FOREIGN}
    env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
    if shutil.which(argv[0], path=env.get("PATH")) is None:
        raise EngineError(f"{argv[0]} is not installed", f"Install {argv[0]}, then repeat.")
    group = ProcessGroup("install", _GRACE_SECONDS)
    try:
        child = group.start(command, argv, log_path=log_path, env=env, cwd=log_path.parent)
        with waiting(lambda: " ".join(tail(child.log_path, 1)) or command):
            while child.poll() is None:
                group.check()
                time.sleep(_POLL_SECONDS)
    finally:
        group.stop()
    if child.poll() != 0:
        lines = " | ".join(tail(child.log_path, _NUM_QUOTED_LINES)) or "nothing"
        cause = f"{command}: {child.exit_cause()}; its last lines: {lines}"
        raise EngineError(cause, f"Fix that, then repeat: what is done stays done. All of it: {log_path}")


def examine(installation: Installation, rules: Rules, root: Path, gpus: Sequence[Gpu]) -> list[Check]:
    """Check each part that running `rules` on `gpus` for the checkout at `root` needs. Takes under 0.3 s.

    Without a checkout its parts are not checked. No GPUs: its packages may differ from the pins, without CUDA.
    """
    parts = {"checkout": checkout_problem(installation)}
    if parts["checkout"] is None:
        parts |= {
            "packages": packages_problem(installation, has_gpus=bool(gpus)),
            "environments": requirements_problem(installation, rules),
            "model": model_problem(rules, root) or shape_problem(rules, root),
        }
    parts["data"] = data_problem(root, rules)
    details = {"checkout": str(installation.root)}
    return [Check(ENGINE, name, problem, details.get(name, "")) for name, problem in parts.items()]


def checkout_problem(installation: Installation) -> EngineError | None:
    """Return the problem of a checkout at another commit, without a submodule, or with changed files."""
    root, commit = installation.root, installation.pins.commit
    if not (root / ".git").exists():
        return EngineError(f"prime-rl is not installed in {root}", PREPARE)
    try:
        head, changes = Repo(root).head().commit, Repo(root).changes()
    except EngineError as error:
        return EngineError(f"{root}: {error}", PREPARE)
    missing = [name for name in SUBMODULES if not (root / name / ".git").exists()]
    if head != commit:
        cause = f"{root} is at commit {str(head)[:9]}, this version runs prime-rl at {commit[:9]}"
        fix = f"Run: git -C {root} checkout {commit}, then uv run prepare.py; or leave out --prime-rl."
    elif missing:
        cause = f"{root / missing[0]} is empty: a submodule is missing"
        fix = f"Run: git -C {root} submodule update --init --recursive."
    elif changes:
        cause = f"{root}: {changes[0]} differs from the pinned commit"
        fix = f"Look: git -C {root} status; then restore it, or leave out --prime-rl."
    else:
        return None
    return EngineError(cause, fix)


def packages_problem(installation: Installation, *, has_gpus: bool) -> EngineError | None:
    """Return the problem of a program or a package that is missing or not the pinned one."""
    if installation.unfinished_sync.exists():
        return EngineError("prime-rl's packages are not all installed: uv sync did not end well", PREPARE)
    for program in PROGRAMS:
        if not os.access(installation.bin_dir / program, os.X_OK):
            return EngineError(f"{installation.bin_dir / program} is missing", PREPARE)
    for name in ("torch", "vllm", "flash_attn") if has_gpus else ():
        pinned, version = getattr(installation.pins, name), installation.version(name)
        if version is None or pinned not in (version, version.partition("+")[0]):
            return EngineError(f"prime-rl's environment has {name} {version}, pinned is {pinned}", PREPARE)
    return None


def requirements_problem(installation: Installation, rules: Rules) -> EngineError | None:
    """Return the problem of an environment whose required packages are missing; ours require one version."""
    missing = set()
    for environment in rules.environments:
        for requirement in environment.versions:
            name, _, pinned = requirement.partition("==")
            version = installation.version(name)
            if version is None or not (environment.taskset or version == pinned):
                missing.add(requirement)
    if not missing:
        return None
    fix = f"Run: uv pip install --python {installation.bin_dir / 'python'} {' '.join(sorted(missing))}"
    return EngineError("prime-rl's environment lacks what an environment of rules.toml requires", fix)


def shape_problem(rules: Rules, root: Path) -> EngineError | None:
    """Return the problem of a model that the server could not divide over its GPUs, or whose context is too short."""
    model = dict[str, Any]()
    with suppress(OSError, ValueError):
        model = parse_json(read_file(model_folder(rules, root) / "config.json"), dict[str, Any])
    heads, positions = model.get("num_attention_heads"), model.get("max_position_embeddings")
    if isinstance(heads, int) and heads % rules.tensor_parallel:
        cause = f"{RULES_NAME}: tensor_parallel = {rules.tensor_parallel} does not divide the {heads} attention heads"
        return EngineError(f"{cause} of {rules.model}", "Write a divisor, or 1.")
    # Scaled positions reach further, by rules of vLLM's own.
    is_scaled = any("factor" in (model.get(key) or ()) for key in ("rope_scaling", "rope_parameters"))
    prompt_tokens = max(environment.prompt_tokens for environment in load_environments(root, rules.scored))
    needed = context_tokens(rules, prompt_tokens)
    if isinstance(positions, int) and positions < needed and not is_scaled:
        cause = f"{RULES_NAME}: prompt and answers may need {needed} tokens, {rules.model} has a context of {positions}"
        fix = "Write less room in [environment.NAME] (prompt_tokens, conversation_tokens), or another model."
        return EngineError(cause, fix)
    return None


def guesses(rules: Rules, root: Path) -> list[Check]:
    """Return what may make a run of the checkout at `root` slow or fail here. These warnings refuse no run."""
    warnings = dict[str, EngineError]()
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        warnings["compiler"] = EngineError("no cc, gcc or clang, which Triton needs", "Run: sudo apt install gcc.")
    if (free := free_disk_gb(_SHM)) < _SHM_GB:
        cause = f"{free:.2f} GB are free in {_SHM}, a run wants {_SHM_GB:g}"
        fix = f"Run: sudo mount -o remount,size=8G {_SHM}; a container: docker run --shm-size=8g."
        warnings["shared memory"] = EngineError(cause, fix)
    # A self-play run keeps more weights.
    run_gb = RUN_DISK_GB + BROADCAST_GB * CURVE_STEPS * any(environment.is_game for environment in rules.environments)
    if (free := free_disk_gb(root)) < run_gb + MODELS_GB:  # MODELS_GB bounds the models of kept experiments
        needs = f"a run needs about {run_gb:g}, a night with its kept models {run_gb + MODELS_GB:g}"
        warnings["disk"] = EngineError(
            f"{free:.1f} GB of disk are free; {needs}", "Run: du -sh runs/*; then delete old ones."
        )
    return [Check(ENGINE, name, warning, is_warning=True) for name, warning in warnings.items()]
