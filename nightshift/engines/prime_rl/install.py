"""The installation of prime-rl: clone it, sync its packages, and check it against the pins in pyproject.toml.

An installation is a checkout of prime-rl with its environment in `.venv`. Nightshift adds one folder, `.nightshift`,
with compile caches and copies of environments.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock

from nightshift.campaign.git import Repo
from nightshift.config.rules import RULES_NAME, TASKSET_FOLDERS, Rules
from nightshift.engines.base import Check, Environ, Note
from nightshift.engines.downloads import data_problem, model_folder, model_problem
from nightshift.errors import EngineError
from nightshift.executors.gpus import Gpu
from nightshift.executors.process import ProcessGroup, tail
from nightshift.files import cache_dir, parse_json, parse_toml, read_file, whole_folder
from nightshift.waiting import waiting

ENGINE = "prime-rl"
ENV_VAR = "NIGHTSHIFT_PRIME_RL"
PREPARE = "Run: uv run prepare.py --engine prime-rl."
# Without prime-kernels, which only other models need.
SUBMODULES = ("deps/verifiers", "deps/renderers", "deps/prime-envs", "deps/pydantic-config")
PROGRAMS = ("python", "inference", "env-server", "orchestrator", "torchrun")
_FOREIGN = ("VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT", "UV_PROJECT_ENVIRONMENT")  # variables of other projects
_TRAINING = """from nightshift_gsm8k.harness import ChatHarness
from nightshift_taskset.training import training_set

__all__ = ["ChatHarness", "TrainingEnv", "TrainingSet"]
"""


class Pins(msgspec.Struct, frozen=True, rename="kebab"):
    """`[tool.nightshift.prime-rl]` of pyproject.toml."""

    repository: str
    commit: str
    python: str
    torch: str  # these three are read by tools/pin.py
    vllm: str
    flash_attn: str

    @classmethod
    def read(cls, pyproject: Path) -> Pins:
        """Read the pins of this version of Nightshift."""
        return msgspec.convert(parse_toml(pyproject.read_bytes())["tool"]["nightshift"]["prime-rl"], cls)


@dataclass(frozen=True)
class Installation:
    """A checkout of prime-rl at `root` (absolute), which may not exist."""

    root: Path
    pins: Pins

    @classmethod
    def find(cls, checkout: Path, environ: Environ) -> Installation:
        """Return the installation for a checkout of Nightshift: in NIGHTSHIFT_PRIME_RL, or in the user's cache."""
        pins = Pins.read(checkout / "pyproject.toml")
        default = cache_dir(environ) / "prime-rl" / pins.commit
        return cls(Path(environ.get(ENV_VAR) or default).expanduser().absolute(), pins)

    @property
    def bin_dir(self) -> Path:
        """The folder of prime-rl's programs. It must be first on PATH: the programs start each other by name."""
        return self.root / ".venv" / "bin"

    @property
    def state_dir(self) -> Path:
        """The folder of all files that Nightshift adds to the checkout."""
        return self.root / ".nightshift"

    @property
    def synced(self) -> Path:
        """A file with the commit whose packages are completely installed."""
        return self.state_dir / "synced"

    def environments_dir(self, root: Path, rules: Rules) -> Path:
        """Return the folder for a copy of the rules' environments, which is on PYTHONPATH of runs."""
        files = sorted(environment_files(root, rules).items())
        return self.state_dir / "environments" / hashlib.sha256(repr(files).encode()).hexdigest()[:16]

    def copy_environments(self, root: Path, rules: Rules) -> None:
        """Copy the environments unless a copy exists. Several workers may call this at once."""
        target = self.environments_dir(root, rules)
        self.state_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(self.state_dir / "environments.lock"):
            if target.exists():
                return
            with whole_folder(target) as folder:
                for name, data in environment_files(root, rules).items():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(data)

    def environment(self, root: Path, rules: Rules, path: str) -> dict[str, str]:
        """Return the variables with which a process uses this installation. `path`: the user's PATH."""
        caches = self.state_dir / "caches"
        return {
            "PATH": f"{self.bin_dir}{os.pathsep}{path}",
            "VIRTUAL_ENV": str(self.bin_dir.parent),
            "PYTHONPATH": str(self.environments_dir(root, rules)),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
        }

    def version(self, package: str) -> str | None:
        """Return the installed version of a package from its metadata; None if it is not installed."""
        site_packages = self.root / ".venv" / "lib" / f"python{self.pins.python}" / "site-packages"
        packages = metadata.distributions(name=package, path=[str(site_packages)])
        return next((package.version for package in packages), None)

    def versions(self) -> dict[str, str]:
        """Return the commit of the checkout and the versions of its packages, without missing ones."""
        versions = {name: self.version(name) for name in ("torch", "vllm", "transformers")}
        with suppress(EngineError):  # the checkout may be missing
            versions["prime-rl"] = Repo(self.root).head().commit
        return {name: version for name, version in versions.items() if version is not None}


def environment_files(root: Path, rules: Rules) -> dict[str, bytes]:
    """Return the files of all packages that runs need on PYTHONPATH: their bytes by name.

    For a user's taskset, a generated package gives prime-rl the training set.
    """
    packages = [root / loss.folder for loss in rules.losses]
    folders, siblings, generated = set[Path](), list[Path](), dict[str, bytes]()
    for environment in rules.environments:
        taskset = environment.taskset
        folders |= {root / folder for folder in (TASKSET_FOLDERS if taskset else environment.folders)}
        if taskset is not None:
            packages.append(taskset.place(root))
            siblings += taskset.beside(root)
            spec = asdict(taskset)
            spec |= {name: getattr(environment, name) for name in ("args", "num_validation", "num_train")}
            text = f"{_TRAINING}TrainingSet, TrainingEnv = training_set({spec!r})\n"
            generated[f"{environment.package}/__init__.py"] = text.encode()
    packages += [path.parent for folder in (*folders, *siblings) for path in folder.glob("*/__init__.py")]
    files = {
        path.relative_to(package.parent).as_posix(): path.read_bytes()
        for package in packages
        for path in (package.rglob("*") if package.is_dir() else [package])
        if path.is_file() and path.suffix != ".pyc"
    }
    return files | generated


def install(installation: Installation, environ: Environ, note: Note, *, has_gpus: bool) -> None:
    """Clone prime-rl and sync its packages, unless that is done, and check them. A second call resumes.

    EngineError: a command failed, or a part differs from the pins.

    Args:
        environ: the user's environment, with proxies, mirrors and certificates.
        has_gpus: False for the user's own environment without CUDA, whose packages are not changed.
    """
    root, pins = installation.root, installation.pins
    log_path = root.with_name(f"{root.name}.install.log")  # deleted when the installation is complete
    run = partial(_run, environ, log_path, note)
    if not root.exists() or not any(root.iterdir()):
        with whole_folder(root) as clone:
            # .gitmodules has SSH addresses. No shallow clone: verifiers reads its version from git's tags.
            https = f"url.{pins.repository.rsplit('/', 2)[0]}/.insteadOf=git@github.com:"
            git = ("git", "-c", "core.hooksPath=/dev/null", "-c", https)
            run(*git, "clone", "--progress", "--no-checkout", pins.repository, clone)
            run(*git, "-C", clone, "checkout", "--detach", pins.commit)
            run(*git, "-C", clone, "submodule", "update", "--init", "--recursive", "--", *SUBMODULES)
    if problem := checkout_problem(installation):
        raise problem
    installation.state_dir.mkdir(exist_ok=True)
    (installation.state_dir / ".gitignore").write_text("*\n")
    problem = packages_problem(installation, has_gpus=has_gpus)
    if problem and has_gpus:
        # uv's Python has the headers that Triton needs; a system's Python often lacks them (vllm issue 27890).
        # --inexact keeps additional packages of the user.
        python = ("--managed-python", "--python", pins.python)
        installation.synced.unlink(missing_ok=True)
        run("uv", "sync", "--directory", root, "--locked", "--inexact", "--no-dev", *python, "--extra", "flash-attn")
        installation.synced.write_text(pins.commit)
        problem = packages_problem(installation, has_gpus=has_gpus)
    if problem:
        raise problem
    log_path.unlink(missing_ok=True)


def _run(environ: Environ, log_path: Path, note: Note, *argv: str | Path) -> None:
    """Note a command and run it. EngineError with the last lines of its log if it fails."""
    command = shlex.join(map(str, argv))
    note(f"$ {command}")
    env = {name: value for name, value in environ.items() if name not in _FOREIGN}
    env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
    group = ProcessGroup("install", grace_seconds=5.0)  # git and uv clean up after themselves on SIGTERM
    try:
        child = group.start(command, argv, log_path=log_path, env=env, cwd=log_path.parent)
        with waiting(lambda: " ".join(tail(log_path, 1)) or command):
            child.wait()
    finally:
        group.stop()
    if child.returncode:
        cause = f"{command}: {child.exit_cause()}; its last lines: {' | '.join(tail(log_path, 4)) or 'nothing'}"
        raise EngineError(cause, f"Fix that, then run the command again: it resumes. The log: {log_path}")


def examine(installation: Installation, rules: Rules, root: Path, gpus: Sequence[Gpu]) -> list[Check]:
    """Check each part of the installation that a run of the checkout at `root` needs."""
    parts = {"checkout": checkout_problem(installation)}
    if parts["checkout"] is None:
        parts |= {
            "packages": packages_problem(installation, has_gpus=bool(gpus)),
            "environments": requirements_problem(installation, rules),
            "model": model_problem(rules, root) or shape_problem(rules, root),
        }
    parts["data"] = data_problem(root, rules)
    return [Check(ENGINE, name, problem) for name, problem in parts.items()]


def checkout_problem(installation: Installation) -> EngineError | None:
    """Return a problem if the checkout is missing, at another commit, without a submodule, or has changed files."""
    root, commit = installation.root, installation.pins.commit
    if not (root / ".git").exists():
        return EngineError(f"prime-rl is not installed in {root}", PREPARE)
    head = Repo(root).head().commit
    missing = [f"{name} (submodule)" for name in SUBMODULES if not (root / name / ".git").exists()]
    if head != commit:
        cause = f"{root} is at commit {str(head)[:9]}, this version runs prime-rl at {commit[:9]}"
    elif differences := missing + Repo(root).changes():
        cause = f"{root} differs from the pinned commit: {differences[0]}"
    else:
        return None
    commands = f"git -C {root} checkout {commit}, then git -C {root} submodule update --init --recursive"
    return EngineError(cause, f"Restore your changes, then run: {commands}; or leave out --prime-rl.")


def packages_problem(installation: Installation, *, has_gpus: bool) -> EngineError | None:
    """Return the problem of a program that is missing, or with GPUs of packages that Nightshift has not synced."""
    for program in PROGRAMS:
        if not os.access(installation.bin_dir / program, os.X_OK):
            return EngineError(f"{installation.bin_dir / program} is missing", PREPARE)
    synced = installation.synced
    if has_gpus and not (synced.exists() and synced.read_text() == installation.pins.commit):
        return EngineError("prime-rl's packages are incomplete: uv sync did not finish for this commit", PREPARE)
    return None


def requirements_problem(installation: Installation, rules: Rules) -> EngineError | None:
    """Return the problem of an environment whose required packages are missing, or, without a user's taskset, have
    another version."""
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
    return EngineError("packages that an environment of rules.toml requires are missing", fix)


def shape_problem(rules: Rules, root: Path) -> EngineError | None:
    """Return the problem of a model whose attention heads tensor_parallel does not divide."""
    model = parse_json(read_file(model_folder(rules, root) / "config.json"), dict[str, Any])
    if not (heads := model.get("num_attention_heads", 0)) % rules.tensor_parallel:
        return None
    cause = f"{RULES_NAME}: tensor_parallel = {rules.tensor_parallel} does not divide the {heads} attention heads"
    return EngineError(f"{cause} of {rules.model}", "Write a divisor, or 1.")
