"""Where prime-rl is installed, and whether it is what pyproject.toml pins. Writes copies of environments only.

An installation is prime-rl's own checkout with its own environment in `.venv`. All that Nightshift adds
lies in one folder of it, `.nightshift`: compile caches, the environments, the pinned model.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from nightshift.campaign.finish import MODELS_GB
from nightshift.config.rules import TASKSET_FOLDERS, Rules
from nightshift.engines.base import Check
from nightshift.engines.downloads import data_problem, is_whole_model, local_problem
from nightshift.engines.prime_rl.launch import free_ports
from nightshift.errors import EngineError
from nightshift.evaluation.environment import CURVE_STEPS
from nightshift.executors.gpus import Gpu
from nightshift.files import free_disk_gb

ENGINE = "prime-rl"
MIN_DRIVER = 525  # of CUDA 12, for which torch (12.8) and vLLM (12.9) are built
# One run: three broadcasts at once of 1.3 GB (494 M parameters in bf16, the tied head of 136 M once more), the kept
# model, traces, logs.
RUN_DISK_GB = 6.0
BROADCAST_GB = 1.3
_GLIBC = (2, 28)  # vllm-0.26.0+cu129-cp38-abi3-manylinux_2_28; flash-attn's wheel names none
_SHM, _SHM_GB = Path("/dev/shm"), 0.5  # runs on a CPU left segments of 168 MB there; a container has 64 MB by default
_OPEN_FILES = 1024  # 512 answers are asked for at once, each a connection; vLLM raises its own limit


def machine_warnings(root: Path, rules: Rules) -> list[Check]:
    """What may make a run of the checkout at `root` fail on this machine. A self-play run keeps more weights."""
    (libc, version), warnings = platform.libc_ver(), dict[str, EngineError]()
    if libc != "glibc" or tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < _GLIBC:
        cause = f"{f'{libc} {version}'.strip() or 'an unknown libc'}: vLLM's wheel is for glibc 2.28 or newer"
        warnings["glibc"] = EngineError(cause, "Run a container of Ubuntu 22.04 or newer: docs/gpus.md.")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        warnings["compiler"] = EngineError("no cc, gcc or clang, which Triton needs", "Run: sudo apt install gcc.")
    if (free := free_disk_gb(_SHM)) < _SHM_GB:
        cause = f"{free:.2f} GB are free in {_SHM}, a run wants {_SHM_GB:g}"
        fix = f"Run: sudo mount -o remount,size=8G {_SHM}; a container: docker run --shm-size=8g."
        warnings["shared memory"] = EngineError(cause, fix)
    if (soft := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < _OPEN_FILES:
        warnings["open files"] = EngineError(f"a process may open {soft} files", f"Run: ulimit -n {_OPEN_FILES}")
    try:
        free_ports()
    except EngineError as error:
        warnings["ports"] = error
    run_gb = RUN_DISK_GB + BROADCAST_GB * CURVE_STEPS * any(environment.is_game for environment in rules.environments)
    if (free := free_disk_gb(root)) < run_gb + MODELS_GB:  # the models of kept experiments, of which no more are left
        needs = f"a run needs about {run_gb:g}, a night with its kept models {run_gb + MODELS_GB:g}"
        cause = f"{free:.1f} GB of disk are free; {needs}"
        warnings["disk"] = EngineError(cause, "Run: du -sh runs/*; then delete old ones.")
    if "microsoft" in platform.release().lower() and root.is_relative_to("/mnt"):
        warnings["WSL"] = EngineError(f"{root} is a slow folder of Windows", "Clone it into Linux's own file system.")
    return [Check(ENGINE, name, warning, is_warning=True) for name, warning in warnings.items()]


_TRAINING = """from nightshift_gsm8k.harness import ChatHarness
from nightshift_taskset.training import training_set

__all__ = ["ChatHarness", "TrainingSet"]
"""


def environment_files(root: Path, rules: Rules) -> dict[str, bytes]:
    """What runs need on PYTHONPATH, by name: packages, but for compiled files. Other environments may come and go. Of
    somebody's taskset prime-rl gets the training set, by a package that is written here."""
    folders = {folder for one in rules.environments for folder in (TASKSET_FOLDERS if one.taskset else one.folders)}
    packages = [path.parent for folder in folders for path in (root / folder).glob("*/__init__.py")]
    written = {}
    for one in rules.environments:
        if one.taskset is not None:
            packages.append(one.taskset.place(root))
            packages += [path.parent for beside in one.taskset.beside(root) for path in beside.glob("*/__init__.py")]
            named = {name: getattr(one, name) for name in ("args", "num_validation", "num_train")}
            spec = asdict(one.taskset) | named
            text = f"{_TRAINING}TrainingSet = training_set({spec!r})\n"
            written[f"{one.package}/__init__.py"] = text.encode()
    return files_of(packages) | written


def environments_hash(files: Mapping[str, bytes]) -> str:
    """16 hex digits over their names and bytes."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:16]


def files_of(packages: Sequence[Path]) -> dict[str, bytes]:
    """Their files by name."""
    return {
        path.relative_to(package.parent).as_posix(): path.read_bytes()
        for package in packages
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def missing(rules: Rules, site_packages: Path) -> Iterator[str]:
    """`name==version` of what environments require and one of Python does not have; of ours in that version."""
    for one in rules.environments:
        for version in one.versions:
            name, _, wanted = version.partition("==")
            there = {found.version for found in metadata.distributions(name=name, path=[str(site_packages)])}
            if not there or not (one.taskset or wanted in there):
                yield version


ENV_VAR = "NIGHTSHIFT_PRIME_RL"
PREPARE = "Run: uv run prepare.py --engine prime-rl."
# The fifth one, prime-kernels, is for other models.
SUBMODULES = ("deps/verifiers", "deps/renderers", "deps/prime-envs", "deps/pydantic-config")
PROGRAMS = ("inference", "env-server", "orchestrator", "torchrun")
_GIT_SECONDS = 30.0


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
        """The pins of this version of Nightshift."""
        table = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["nightshift"]["prime-rl"]
        return cls(**{name: table[name.replace("_", "-")] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Installation:
    """prime-rl's checkout at `root` (absolute), there or not."""

    root: Path
    pins: Pins

    @classmethod
    def find(cls, pins: Pins, environ: Mapping[str, str]) -> Installation:
        """The folder that NIGHTSHIFT_PRIME_RL names, else one in the user's cache."""
        default = cache_dir(environ) / "prime-rl" / pins.commit
        return cls(Path(environ.get(ENV_VAR) or default).expanduser().absolute(), pins)

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def bin_dir(self) -> Path:
        """prime-rl's programs; its processes start each other by bare name, so it comes first on their PATH."""
        return self.venv / "bin"

    @property
    def site_packages(self) -> Path:
        return self.venv / "lib" / f"python{self.pins.python}" / "site-packages"

    @property
    def state_dir(self) -> Path:
        """Everything that Nightshift adds to the checkout."""
        return self.root / ".nightshift"

    @property
    def hub_dir(self) -> Path:
        """A Hugging Face cache whose only model is the pinned one, as its `main`: prime-rl has no revision key."""
        return self.state_dir / "hub"

    @property
    def unfinished_sync(self) -> Path:
        """Exists while packages are being installed, and after that was interrupted."""
        return self.state_dir / "sync.unfinished"

    def environments_dir(self, root: Path, rules: Rules) -> Path:
        """The copy of the rules' environments in the Nightshift checkout at `root`, named by their bytes.

        So two checkouts with different environments share an installation. It goes on PYTHONPATH.
        """
        return self.state_dir / "environments" / environments_hash(environment_files(root, rules))

    def copy_environments(self, root: Path, rules: Rules) -> None:
        """Copy the environments as they are now; never a link to files that may change."""
        target = self.environments_dir(root, rules)
        temporary = target.with_name(f"{target.name}.tmp")
        for folder in (temporary, target):
            shutil.rmtree(folder, ignore_errors=True)
        for name, data in environment_files(root, rules).items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(data)
        temporary.replace(target)

    def warm_mark(self, gpus: Sequence[Gpu]) -> Path:
        """Exists once an unscored run has filled the compile caches for this kind of GPUs and driver."""
        kind = "\0".join(f"{gpu.name} {gpu.driver}" for gpu in dict.fromkeys(gpus))
        return self.state_dir / "caches" / f"warm-{hashlib.sha256(kind.encode()).hexdigest()[:16]}"

    def environment(self, root: Path, rules: Rules, path: str) -> dict[str, str]:
        """Variables that make a process use this installation; `path` is the caller's PATH."""
        caches = self.state_dir / "caches"
        return {
            "PATH": f"{self.bin_dir}{os.pathsep}{path}",
            "VIRTUAL_ENV": str(self.venv),
            "PYTHONPATH": str(self.environments_dir(root, rules)),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
            "HF_HUB_CACHE": str(self.hub_dir),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
        }


def problems(installation: Installation, rules: Rules, root: Path, gpus: Sequence[Gpu]) -> list[str]:
    """What keeps the installation from running `rules` on `gpus` for the checkout at `root`, with fixes.

    Takes under 0.3 s. No GPUs: it was built without CUDA, so its packages may differ from the pins.
    """
    return [str(check.problem) for check in examine(installation, rules, root, gpus) if not check.ok]


def examine(installation: Installation, rules: Rules, root: Path, gpus: Sequence[Gpu]) -> list[Check]:
    """Each part, with the first thing wrong with it. Without a checkout its parts are not checked."""
    found = {"checkout": checkout_problem(installation)}
    if found["checkout"] is None:
        found |= {
            "packages": packages_problem(installation, has_gpus=bool(gpus)),
            "environments": environments_problem(installation, root, rules),
            "model": model_problem(installation, rules) or local_problem(rules, root),
            "warm caches": warm_problem(installation, gpus),
        }
    found["data"] = data_problem(root, rules)
    where = {"checkout": str(installation.root)}
    return [Check(ENGINE, name, problem, where.get(name, "")) for name, problem in found.items()]


def checkout_problem(installation: Installation) -> EngineError | None:
    """Another commit than the pinned one, a submodule that is missing, or files that differ."""
    root, commit = installation.root, installation.pins.commit
    if not (root / ".git").exists():
        return EngineError(f"prime-rl is not installed in {root}", PREPARE)
    try:
        head = _read_git(root, "rev-parse", "HEAD")
        changed = _read_git(root, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=untracked")
    except EngineError as error:
        return error
    if head != commit:
        return EngineError(
            f"{root} is at commit {head[:9]}, this version runs prime-rl at {commit[:9]}",
            f"Run: git -C {root} checkout {commit}, then uv run prepare.py; or leave out --prime-rl.",
        )
    for name in SUBMODULES:
        if not (root / name / ".git").exists():
            return EngineError(
                f"{root / name} is empty: a submodule is missing",
                f"Run: git -C {root} submodule update --init --recursive.",
            )
    if changed:
        return EngineError(
            f"{root}: {changed.splitlines()[0][2:].strip()} differs from the pinned commit",
            f"Look: git -C {root} status; then restore it, or leave out --prime-rl.",
        )
    return None


def packages_problem(installation: Installation, *, has_gpus: bool) -> EngineError | None:
    """A Python, a program or a package that is missing or not the pinned one."""
    pins = installation.pins
    if installation.unfinished_sync.exists():
        return EngineError("prime-rl's packages are not all installed: uv sync did not end well", PREPARE)
    if not os.access(installation.bin_dir / "python", os.X_OK) or not installation.site_packages.is_dir():
        return EngineError(f"{installation.venv} has no Python {pins.python}", PREPARE)
    for program in PROGRAMS:
        if not os.access(installation.bin_dir / program, os.X_OK):
            return EngineError(f"{installation.bin_dir / program} is missing", PREPARE)
    if has_gpus:
        for name, pinned in (("torch", pins.torch), ("vllm", pins.vllm), ("flash_attn", pins.flash_attn)):
            version = _version(installation.site_packages, name)
            if version is None or pinned not in (version, version.partition("+")[0]):
                return EngineError(f"prime-rl's environment has {name} {version}, pinned is {pinned}", PREPARE)
    return None


def environments_problem(installation: Installation, root: Path, rules: Rules) -> EngineError | None:
    """The copy of the rules' environments is missing or was changed; one requires what is not there."""
    folder = installation.environments_dir(root, rules)
    if environments_hash(files_of([path for path in folder.glob("*") if path.is_dir()])) != folder.name:
        return EngineError(f"{folder} is not the copy of {root / 'environments'}", PREPARE)
    if lacking := sorted({*missing(rules, installation.site_packages)}):
        fix = f"Run: uv pip install --python {installation.bin_dir / 'python'} {' '.join(lacking)}"
        return EngineError("prime-rl's environment lacks what an environment of rules.toml requires", fix)
    return None


def model_problem(installation: Installation, rules: Rules) -> EngineError | None:
    """The hub cache of the installation lacks the rules' model, or its `main` is another revision."""
    if rules.model_revision is None:
        return None
    folder = model_folder(installation, rules)
    main = folder / "refs" / "main"
    is_main = main.is_file() and main.read_text() == rules.model_revision
    if is_main and is_whole_model(folder / "snapshots" / rules.model_revision):
        return None
    return EngineError(f"{rules.model} at {rules.model_revision[:9]} is not complete in {folder}", PREPARE)


def warm_problem(installation: Installation, gpus: Sequence[Gpu]) -> EngineError | None:
    """No unscored run has filled the compile caches for these GPUs: the first experiment would pay for it."""
    if not gpus or installation.warm_mark(gpus).is_file():
        return None
    ids = ",".join(str(gpu.index) for gpu in gpus)
    return EngineError(f"the compile caches are cold for {gpus[0].name}", f"Run: uv run prepare.py --gpus {ids}.")


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Nightshift's folder in the user's cache."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nightshift"


def installed_versions(installation: Installation) -> dict[str, str]:
    """The commit of the checkout and the packages of its environment; what is not there is left out."""
    found = {name: _version(installation.site_packages, name) for name in ("torch", "vllm", "transformers")}
    with suppress(EngineError):
        found["prime-rl"] = _read_git(installation.root, "rev-parse", "HEAD")
    return {name: version for name, version in found.items() if version is not None}


def model_folder(installation: Installation, rules: Rules) -> Path:
    """Where a Hugging Face cache keeps the rules' model."""
    return installation.hub_dir / f"models--{rules.model.replace('/', '--')}"


def _version(site_packages: Path, name: str) -> str | None:
    """The version of an installed package, from the name of its metadata folder; None if it is not there."""
    for path in site_packages.glob(f"{name}-*.dist-info"):
        return path.name.removesuffix(".dist-info").rpartition("-")[2]
    return None


def _read_git(root: Path, *arguments: str) -> str:
    """Return what a reading git command prints, whatever the user's git configuration is. EngineError if it fails."""
    environ = {"PATH": os.environ.get("PATH", os.defpath), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    # Another user may have installed the checkout for all: nothing of it is executed here.
    safe = ("--no-optional-locks", "-c", "safe.directory=*", "-c", "core.fsmonitor=false")
    command = ["git", *safe, "-C", os.fspath(root), *arguments]
    try:
        result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        cause = " ".join(str(getattr(error, "stderr", None) or error).split())[:200]
        raise EngineError(f"git {arguments[0]} fails in {root}: {cause}", PREPARE) from None
    return result.stdout.strip("\n")
