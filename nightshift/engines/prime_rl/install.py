"""Installs prime-rl at its pins: git clone, uv sync, a copy of our environments; links to the pinned model.

A step whose check in installation.py passes is left out, so installing again resumes. A clone is renamed when it is
complete, and a mark stays until all packages are installed. Nothing else is written but uv's own cache.
"""

import shlex
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nightshift.config.rules import Rules
from nightshift.engines.base import Note
from nightshift.engines.prime_rl.installation import (
    SUBMODULES,
    Installation,
    checkout_problem,
    environments_problem,
    model_folder,
    packages_problem,
)
from nightshift.errors import EngineError
from nightshift.executors.gpus import Gpu
from nightshift.executors.process import ProcessGroup
from nightshift.files import disk_error, free_disk_gb, write_atomically
from nightshift.waiting import waiting

# 274 packages: 4.1 GB of wheels of known size in uv.lock beside torch, vllm and flash-attn, about 6 GB in all.
# Unpacked about twice that (an estimate), once more where uv's cache is on another file system, and a clone.
INSTALL_DISK_GB = 20.0
GRACE_SECONDS = 5.0  # git and uv clean up after themselves on SIGTERM
NUM_QUOTED_LINES = 4
_POLL_SECONDS = 0.5
_FOREIGN = ("VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT", "UV_PROJECT_ENVIRONMENT")  # of other projects


@dataclass(frozen=True, slots=True)
class Installer:
    """Brings one installation to its pins, for the rules' environments in the Nightshift checkout at `root`.

    `gpus` are those it shall run on; with none (a build of one's own without CUDA) packages are left alone.
    `environ` is the user's own: proxies, mirrors and certificates are in it.
    """

    installation: Installation
    root: Path
    rules: Rules
    gpus: Sequence[Gpu]
    environ: Mapping[str, str]
    note: Note

    def install(self) -> None:
        """Do what is missing. Raises EngineError with the cause and its fix."""
        it = self.installation
        if not it.venv.exists() and (free := free_disk_gb(it.root)) < INSTALL_DISK_GB:
            raise EngineError(
                f"{free:.1f} GB of disk are free for {it.root}, prime-rl needs {INSTALL_DISK_GB:g}",
                "Free disk space, or choose another folder: --prime-rl DIR.",
            )
        try:
            if not it.root.exists() or not any(it.root.iterdir()):
                self._clone()
            if problem := checkout_problem(it):  # a checkout of the user's is not changed
                raise problem
            if not it.state_dir.exists():
                it.state_dir.mkdir()
                (it.state_dir / ".gitignore").write_text("*\n")
            if packages_problem(it, has_gpus=bool(self.gpus)):
                self._sync_packages()
            if environments_problem(it, self.root, self.rules):
                it.copy_environments(self.root, self.rules)
        except OSError as error:
            raise disk_error(error, it.root) from None
        if problem := packages_problem(it, has_gpus=bool(self.gpus)) or environments_problem(it, self.root, self.rules):
            raise problem
        self._log_path.unlink(missing_ok=True)

    @property
    def _log_path(self) -> Path:
        """What the commands print; beside the installation until the installation is complete."""
        return self.installation.root.with_name(f"{self.installation.root.name}.install.log")

    def _clone(self) -> None:
        """Clone with submodules, at the pinned commit. SSH addresses of .gitmodules are read as HTTPS ones.

        With all history: verifiers reads its own version from git's tags, and prime-rl asks for a minimum.
        """
        root, pins = self.installation.root, self.installation.pins
        clone = root.with_name(f"{root.name}.clone")
        shutil.rmtree(clone, ignore_errors=True)
        clone.parent.mkdir(parents=True, exist_ok=True)
        https = f"url.{pins.repository.rsplit('/', 2)[0]}/.insteadOf=git@github.com:"
        git: list[str | Path] = ["git", "-c", "core.hooksPath=/dev/null", "-c", https]
        self._run([*git, "clone", "--progress", "--no-checkout", pins.repository, clone])
        self._run([*git, "-C", clone, "checkout", "--detach", pins.commit])
        self._run([*git, "-C", clone, "submodule", "update", "--init", "--recursive", "--", *SUBMODULES])
        # Fills the indexes' times, without which every later check reads all files: 0.8 s instead of 0.01 s.
        self._run(["git", "-C", clone, "status", "--short"])
        clone.replace(root)

    def _sync_packages(self) -> None:
        """prime-rl's own lock file into its own `.venv`. --inexact leaves what somebody installed beside it.

        uv's own Python has the headers with which Triton compiles; a system's often lacks them (vllm issue 27890).
        """
        it = self.installation
        if not self.gpus:
            raise EngineError(
                f"{it.venv} is not complete, and without GPUs (--gpus none) none is built",
                "Build prime-rl's environment there yourself, without CUDA.",
            )
        it.unfinished_sync.touch()
        python = ["--managed-python", "--python", it.pins.python]
        options = ["--locked", "--inexact", "--no-dev", *python, "--extra", "flash-attn"]
        self._run(["uv", "sync", "--directory", it.root, *options])
        it.unfinished_sync.unlink()

    def _run(self, argv: Sequence[str | Path]) -> None:
        """Show a command and run it to its end. EngineError with the last lines of its log if it fails."""
        command = shlex.join(map(str, argv))
        self.note(f"$ {command}")
        env = {name: value for name, value in self.environ.items() if name not in _FOREIGN}
        env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
        if shutil.which(argv[0], path=env.get("PATH")) is None:
            raise EngineError(f"{argv[0]} is not installed", f"Install {argv[0]}, then repeat.")
        group = ProcessGroup(f"install-{uuid.uuid4().hex}", GRACE_SECONDS)
        try:
            child = group.start(command, argv, log_path=self._log_path, env=env, cwd=self._log_path.parent)
            with waiting(lambda: " ".join(child.tail(1)) or command):
                while child.poll() is None:
                    group.check()
                    time.sleep(_POLL_SECONDS)
        finally:
            group.stop()
        if child.poll() != 0:
            lines = " | ".join(child.tail(NUM_QUOTED_LINES)) or "nothing"
            cause = f"{command}: {child.exit_cause()}; its last lines: {lines}"
            raise EngineError(cause, f"Fix that, then repeat: what is done stays done. All of it: {self._log_path}")


def pin_model(installation: Installation, rules: Rules, snapshot: Path) -> None:
    """Show prime-rl the model's pinned revision as `main`, by links to the user's own cache: no second copy.

    prime-rl asks for the model by name only, which a Hugging Face cache resolves through refs/main:
    in the user's cache that is absent, or whatever was downloaded last.
    """
    assert rules.model_revision is not None
    folder = model_folder(installation, rules)
    link = folder / "snapshots" / rules.model_revision
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(snapshot.absolute(), target_is_directory=True)
        write_atomically(folder / "refs" / "main", rules.model_revision.encode())
    except OSError as error:
        raise disk_error(error, folder) from None
