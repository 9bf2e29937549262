"""Throw-away checkouts of this project: files, an environment as uv makes it, git, and what is left running there."""

import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
CAMPAIGN = "autoresearch/test"
MEASURING = "nightshift/evaluation/evaluate.py"  # a file that the rules hash covers
# What an experiment needs of the project.
NAMES = (
    *("run.py", "train.toml", "rules.toml", "program.md", "pyproject.toml", ".gitignore"),
    *("nightshift", "environments", "models"),
)


def git(root: Path, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    """git as a user would call it, with an identity; its stdout."""
    identity = ("-c", "user.name=Tester", "-c", "user.email=tester@localhost", "-c", "gc.auto=0")
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=root, env=env, check=True, capture_output=True, text=True).stdout


def make_checkout(root: Path, branch: str, config: str, *, stand_in: bool = False) -> None:
    """A copy of this project with `config` as train.toml and an environment of its own, on a campaign branch; also of
    what nobody committed yet, but of no ignored files.

    With `stand_in` the stand-in of the tests lies in place of the process that trains: so it is found by whoever
    starts that, in whatever process.
    """
    listed = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *NAMES)
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    if stand_in:
        shutil.copy2(ROOT / "tests/stand_in_trainer.py", root / "nightshift/engines/trl/trainer.py")
    (root / "train.toml").write_text(config)
    make_environment(root)
    commit_all(root, branch)


def small_checkout(folder: Path, config: bytes = b"lr = 0\n") -> Path:
    """`folder`/checkout: a repository with `config` as train.toml, a measuring file and others, on CAMPAIGN."""
    root = folder / "checkout"
    root.mkdir(parents=True)
    (root / "train.toml").write_bytes(config)
    (root / "rules.toml").write_text("environments = []\n")
    (root / MEASURING).parent.mkdir(parents=True)
    (root / MEASURING).write_text("MEASURES = True\n")
    (root / "prepare.py").write_text("PREPARES = True\n")
    (root / "environments").symlink_to(ROOT / "environments")
    (root / "program.md").write_text("Be tireless.\n")
    (root / ".gitignore").write_text("runs/\nresults.tsv\nenvironments\n")
    commit_all(root, CAMPAIGN, "start")
    return root


def commit_all(root: Path, branch: str, message: str = "the harness that was agreed") -> None:
    """Make a repository of the checkout: everything on main, and a campaign branch that begins there."""
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", message)
    git(root, "switch", "--quiet", "--create", branch)


def make_environment(root: Path) -> None:
    """`.venv` as uv makes it: the project's packages by .pth files, the libraries borrowed from ours."""
    folder = root / ".venv"
    venv.create(folder, symlinks=True, with_pip=False)
    packages = site_packages(root)
    paths = {"_libraries": [path for path in sys.path if path.endswith("site-packages")][-1], "nightshift": str(root)}
    for name, path in paths.items():
        (packages / f"{name}.pth").write_text(path + "\n")
    program = folder / "bin" / "nightshift"
    program.write_text(f"#!{folder}/bin/python\nfrom nightshift.cli.command import main\nmain()\n")
    program.chmod(0o755)


def python(root: Path) -> str:
    return f"{root}/.venv/bin/python"


def site_packages(root: Path) -> Path:
    """Of a checkout's own environment."""
    return next((root / ".venv" / "lib").glob("python*/site-packages"))


def clone(folder: Path, branch: str) -> Path:
    """Return a clone of this project's last commit, on a campaign branch."""
    subprocess.run(["git", "clone", "--quiet", "--no-local", str(ROOT), str(folder)], check=True)
    git(folder, "switch", "--quiet", "--create", branch)
    return folder


def leftovers(*folders: Path) -> list[psutil.Process]:
    """Living processes, but this one and its parents, that work in one of the folders or name it."""
    ours = {psutil.Process(), *psutil.Process().parents()}  # a command line above us may name the checkout
    found = []
    for process in psutil.process_iter():
        try:
            if process not in ours and process.status() != psutil.STATUS_ZOMBIE:
                places = "/ ".join([process.cwd(), *process.cmdline()]) + "/"
                if any(f"{folder}/" in places for folder in folders):
                    found.append(process)
        except (psutil.Error, OSError):  # gone, or in a folder too deep for the kernel to name
            continue
    return found


def linked_checkout(folder: Path, config: bytes) -> Path:
    """Make a checkout without git: links to environments and models, rules.toml and a train.toml of its own."""
    folder.mkdir()
    for name in ("environments", "models", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "rules.toml").write_bytes((ROOT / "rules.toml").read_bytes())  # no link is read
    (folder / "train.toml").write_bytes(config)
    return folder
