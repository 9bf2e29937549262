"""Installs prime-rl at its pins: clone, submodules, packages, our environments, the pinned model.

Every step is done when its own check finds nothing, so installing again resumes: a clone is made in a
folder beside and renamed when it is whole, packages that are installed in part leave a mark until they
are whole. Nothing outside the installation is written but uv's own cache; no git configuration is touched.
"""

import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired

from filelock import FileLock, Timeout

from nightshift.config.rules import Rules
from nightshift.engines.base import Note
from nightshift.engines.prime_rl.installation import (
    SUBMODULES,
    Installation,
    checkout_problem,
    environments_problem,
    model_folder,
    packages_problem,
    write_copy,
)
from nightshift.errors import EngineError, UsageError
from nightshift.executors.gpus import Gpu
from nightshift.executors.process import ProcessGroup
from nightshift.files import disk_error, free_disk_gb, write_atomically

# 274 packages: 4.1 GB of wheels of known size in uv.lock beside torch, vllm and flash-attn, about 6 GB in all.
# Unpacked about twice that (an estimate), once more where uv's cache is on another file system, and a clone.
INSTALL_DISK_GB = 20.0
GRACE_SECONDS = 5.0  # git and uv clean up after themselves on SIGTERM
NUM_QUOTED_LINES = 4
_NEWS_SECONDS = 15.0
_POLL_SECONDS = 0.5
# What `uv run prepare.py` or a git hook around it sets for its own project, and what would bend the lock file.
_FOREIGN_VARIABLES = """
    VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONSAFEPATH UV_PROJECT_ENVIRONMENT UV_PROJECT UV_WORKING_DIR UV_PYTHON
    UV_FROZEN UV_LOCKED UV_NO_SYNC UV_EXCLUDE_NEWER UV_RESOLUTION UV_PRERELEASE UV_TORCH_BACKEND
    GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_COMMON_DIR GIT_NAMESPACE GIT_PREFIX
"""


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
        """Do what is missing. EngineError with the cause and its fix; UsageError if another one is at it."""
        it = self.installation
        steps: list[tuple[str, Callable[[], EngineError | None], Callable[[Path], None]]] = [
            ("checkout", lambda: checkout_problem(it), self._clone),
            ("packages", lambda: packages_problem(it, has_gpus=bool(self.gpus)), self._sync_packages),
            ("environments", lambda: environments_problem(it, self.root, self.rules), self._copy_environments),
        ]
        if not any(find_problem() for _, find_problem, _ in steps):
            return
        with self._work_folder() as work:
            free = free_disk_gb(it.root)
            if free < INSTALL_DISK_GB and not it.venv.exists():
                raise EngineError(
                    f"{free:.1f} GB of disk are free for {it.root}, prime-rl needs {INSTALL_DISK_GB:g}",
                    "Free disk space, or choose another folder: --prime-rl DIR.",
                )
            for name, find_problem, repair in steps:
                if problem := find_problem():
                    self.note(f"prime-rl {name}: {problem.cause}")
                    try:
                        repair(work)
                    except OSError as error:
                        reason = f"{error.strerror}: {error.filename}"
                        raise EngineError(f"prime-rl {name}: {reason}", "Free disk space or fix permissions.") from None
                    if problem := find_problem():
                        raise problem

    @contextmanager
    def _work_folder(self) -> Iterator[Path]:
        """A folder beside the installation, for one installer at a time; after a failure its logs stay."""
        work = self.installation.root.with_name(f"{self.installation.root.name}.installing")
        try:
            work.mkdir(parents=True, exist_ok=True)
            lock = FileLock(work / "lock", timeout=0)
            lock.acquire()
        except Timeout:
            raise UsageError(f"another prepare.py installs into {self.installation.root}", "Wait for it.") from None
        except OSError as error:
            raise EngineError(f"cannot write {work}: {error.strerror}", "Choose another folder: --prime-rl.") from None
        try:
            yield work
            shutil.rmtree(work)
        finally:
            lock.release()

    def _clone(self, work: Path) -> None:
        """Clone beside the place, with submodules, and rename: a checkout is whole or not there.

        With all history: verifiers reads its own version from git's tags, and prime-rl asks for a minimum.
        """
        root, pins = self.installation.root, self.installation.pins
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            return  # somebody's own checkout at another commit, or no checkout at all: not ours to change
        clone = work / "clone"
        shutil.rmtree(clone, ignore_errors=True)
        git: list[str | Path] = ["git", "-C", clone]
        steps: dict[str, list[str | Path]] = {
            "git clone": ["git", "clone", "--progress", "--no-checkout", pins.repository, clone],
            "git checkout": [*git, "checkout", "--detach", pins.commit],
            "git submodule update": [*git, "submodule", "update", "--init", "--recursive", "--", *SUBMODULES],
            # Fills the indexes' times, without which every later check reads all files: 0.8 s instead of 0.01 s.
            "git status": [*git, "status", "--porcelain"],
        }
        self.note(f"git clone {pins.repository} at {pins.commit[:9]}")
        for name, argv in steps.items():
            self._run(name, argv, work, work / "clone.log")
        clone.replace(root)

    def _sync_packages(self, work: Path) -> None:
        """prime-rl's own lock file into its own `.venv`. --inexact leaves what somebody installed beside it.

        uv's own Python has the headers with which Triton compiles; a system's often lacks them (vllm issue 27890).
        """
        installation = self.installation
        if not self.gpus:
            raise EngineError(
                f"{installation.venv} is not complete, and without GPUs (--gpus none) none is built",
                "Build prime-rl's environment there yourself, without CUDA.",
            )
        python = installation.pins.python
        argv = ["uv", "sync", "--locked", "--inexact", "--no-dev", "--managed-python", "--python", python]
        argv += ["--extra", "flash-attn"]
        self.note("uv sync: about 6 GB of packages, once")
        self._make_state_dir()
        installation.unfinished_sync.touch()
        self._run("uv sync", argv, installation.root, work / "uv-sync.log")
        installation.unfinished_sync.unlink()

    def _copy_environments(self, work: Path) -> None:
        self._make_state_dir()
        write_copy(self.installation.environments_dir(self.root, self.rules).parent, self.root, self.rules)

    def _run(self, name: str, argv: Sequence[str | Path], cwd: Path, log_path: Path) -> None:
        """Run a long command to its end, with a line of news while it works.

        EngineError with its last lines when it fails; whatever ends this call early (Ctrl-C) ends the command.
        """
        env = self._variables()
        program = shutil.which(argv[0], path=env.get("PATH"))
        if program is None:
            raise EngineError(f"{argv[0]} is not installed", f"Install {argv[0]}, then repeat.")
        log_path.unlink(missing_ok=True)
        began = last_news = time.monotonic()
        group = ProcessGroup(f"install-{uuid.uuid4().hex}", GRACE_SECONDS)
        try:
            child = group.start(name, [program, *argv[1:]], log_path=log_path, env=env, cwd=cwd)
            while child.poll() is None:
                with suppress(TimeoutExpired):
                    child.wait(_POLL_SECONDS)
                group.check()
                now = time.monotonic()
                if now - last_news >= _NEWS_SECONDS:
                    self.note(f"{name}: {now - began:.0f} s  {' '.join(child.tail(1))}".rstrip())
                    last_news = now
        finally:
            left = group.stop()
        if left:
            raise EngineError(f"processes of {name} could not be killed: {', '.join(left)}")
        if child.poll() != 0:
            said = " | ".join(child.tail(NUM_QUOTED_LINES)) or "nothing"
            raise EngineError(
                f"{name} failed with {child.exit_cause()}; its last lines: {said}",
                f"Fix that, then repeat: what is done stays done. All of it: {log_path}",
            )

    def _make_state_dir(self) -> None:
        """The folder that holds all we add, invisible to prime-rl's git."""
        self.installation.state_dir.mkdir(exist_ok=True)
        (self.installation.state_dir / ".gitignore").write_text("*\n")

    def _variables(self) -> dict[str, str]:
        """The user's environment, with SSH addresses of submodules read as HTTPS ones (.gitmodules has no others).

        By variables, because they reach the git processes that git and uv start, and leave no trace.
        """
        foreign = _FOREIGN_VARIABLES.split()
        kept = {name: value for name, value in self.environ.items() if name not in foreign}
        host = self.installation.pins.repository.rsplit("/", 2)[0]
        settings = {
            f"url.{host}/.insteadOf": "git@github.com:",
            "core.hooksPath": "/dev/null",
            "http.lowSpeedLimit": "1000",  # bytes a second, for a minute: a dead connection ends
            "http.lowSpeedTime": "60",
        }
        num_own = int(kept.get("GIT_CONFIG_COUNT") or 0)  # the user's, which stay
        kept["GIT_CONFIG_COUNT"] = str(num_own + len(settings))
        for index, (key, value) in enumerate(settings.items(), start=num_own):
            kept |= {f"GIT_CONFIG_KEY_{index}": key, f"GIT_CONFIG_VALUE_{index}": value}
        return {**kept, "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C"}


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
