"""Every command that only reads, on a checkout whose files were replaced: `stand_in_reader.py ROOT < CASES`.

CASES is JSON: [[name, [[file, content], ...]], ...]: files below ROOT, and what stands in their place, as `put` has
it. Prints JSON: {name: {command: [exit code, last words]}} for each that ends otherwise than with 0, or with 2 and a
line of its own; a hang ends with SIGALRM. "held status" is asked while a head is at work.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import run
from nightshift.campaign.ledger import Ledger
from nightshift.cli import main as cli
from nightshift.errors import NightshiftError
from tests.stand_ins import install
from tests.waiting import HANG_SECONDS

COMMANDS = ("status", "held status", "history", "show 2", "diff", "report", "certify --dry-run",
            "wait --timeout 0", "run.py --dry-run")  # fmt: skip


def put(path: Path, content: dict[str, Any]) -> None:
    """Have `content` stand at `path`, whatever is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    [(kind, value)] = content.items()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to(value)
        case "folder":
            path.mkdir()
        case "bytes":
            path.touch()
            os.truncate(path, value)
        case "text":
            path.write_bytes(value.encode(errors="surrogateescape"))


def ended(root: Path, words: list[str], output: int) -> int:
    """The exit code of one command, in a fork of this process; negative for a signal, SIGALRM where it hangs."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(round(HANG_SECONDS))
        for number in (1, 2):
            os.dup2(output, number)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        os.chdir(root)
        sys.argv = words
        called: Callable[[], Any] = run.main if words[0] == "run.py" else cli.commands
        try:
            called()
        except SystemExit as end:
            code = int(end.code or 0)
        else:
            code = 0
        sys.stdout.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(root: Path) -> None:
    run.ROOT = root
    install("trl")
    found: dict[str, dict[str, Any]] = {}
    saved = root.parent / "saved"
    shutil.copytree(root / "runs", saved, symlinks=True)
    for name, files in json.load(sys.stdin):
        for file, content in files:
            put(root / file, content)
        for line in COMMANDS:
            is_held, words = line.startswith("held"), line.removeprefix("held ").split()
            words = [*words, "--engine=trl", "--again"] if words[0] == "run.py" else ["nightshift", *words]
            words += ["--budget-seconds=1"] * ("--dry-run" in words and "certify" not in words)
            with tempfile.TemporaryFile() as output, ExitStack() as stack:
                with suppress(NightshiftError):  # something stands in place of the lock
                    stack.enter_context(Ledger(root).controller() if is_held else nullcontext())
                code = ended(root, words, output.fileno())
                output.seek(0)
                said = output.read().decode(errors="replace")
            is_fine = code == 0 or (files and code in (1, 2) and len(said.splitlines()) == 1)
            if not is_fine or "Traceback" in said:
                found.setdefault(name, {})[line] = code, said[-300:]
        shutil.rmtree(root / "runs")
        shutil.copytree(saved, root / "runs", symlinks=True)
    shutil.rmtree(saved)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
