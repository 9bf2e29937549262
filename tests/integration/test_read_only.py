"""What only reads works where nothing can be written."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.night_checkout import finish, start_run

COMMANDS = ("status", "history --json", "show 1")


def without_permission(root: Path) -> list[str]:
    """As root, whom permissions do not stop, but without the capability to override them."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
    return ["setpriv", "--bounding-set", "-dac_override,-dac_read_search,-fowner", "--"]


def nightshift(before: list[str], root: Path, *words: str) -> tuple[int, str, str]:
    """The command line in a checkout that can only be read: exit code, stdout, stderr."""
    command = [*before, str(Path(sys.executable).with_name("nightshift")), *words]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def state_of(root: Path) -> dict[str, tuple[int, int]]:
    """All that lies in a checkout, with its size and the time of its last change."""
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in (root, *root.rglob("*"))}


@pytest.mark.slow
def test_what_only_reads_works_where_nothing_can_be_written(root, tmp_path):
    assert finish(start_run(root, "--budget-seconds", "1"))[0] == 0
    before = without_permission(root)
    probe = subprocess.run([*before, "touch", str(root / "runs" / "x")], capture_output=True, text=True, check=False)
    if "Permission denied" not in probe.stderr:
        pytest.skip(f"nothing is read-only here: {probe.stderr or 'touch succeeded'}")
    there = state_of(root)
    for command in COMMANDS:
        code, stdout, stderr = nightshift(before, root, *command.split())
        assert (code, stderr) == (0, "")
        assert len(stdout) > 10
    code, stdout, stderr = nightshift(before, root, "report")
    assert (code, stdout) == (2, "")
    assert stderr.startswith(f"cannot write {root}/runs: ")
    assert stderr.endswith("write elsewhere: uv run nightshift report --output FOLDER.\n")
    assert len(stderr.splitlines()) == 1
    assert state_of(root) == there
    assert nightshift(before, root, "report", "--output", str(tmp_path / "page"))[0] == 0
    assert (tmp_path / "page" / "report.html").exists()
    assert state_of(root) == there
