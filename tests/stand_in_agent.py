"""A stand-in for a coding agent: reads the brief on stdin, edits train.toml, and misbehaves as it is told.

    stand_in_agent.py SCRIPT

SCRIPT is a JSON file: a list of steps, one for each call. It stays in SCRIPT.calls how often it was called, so it knows
its step; beyond the end of the list it behaves. A step is a list of the names below.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TRAIN = Path("train.toml")


def rate(call: int) -> str:
    """Another one each call, 23 times; the first one is poor."""
    return f"{(call * 7 % 23 + 0.2) / 2:g}e-06"


def edit(value: str, call: int = 0) -> None:
    """Change the rate, or in every second call another key: what is in flight may have changed the rate by then."""
    text = TRAIN.read_text()
    if call % 2:
        text = re.sub(r"^weight_decay = .*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"^lr =", f"weight_decay = {float(value) * 1e4:g}\nlr =", text, flags=re.MULTILINE)
    else:
        text = re.sub(r"^lr = .*", f"lr = {value}", text, flags=re.MULTILINE)
    TRAIN.write_text(text)


def answer(call: int, brief: str) -> None:
    lessons = [f"LESSON {n}: call {call} learnt something\n" for n in re.findall(r"^LESSON ([0-9]+)", brief, re.M)]
    text = f"HYPOTHESIS: call {call} tries another rate\nPREDICTION: +1 pp\n"
    Path("hypothesis.txt").write_text(text + "".join(lessons))


def replace_config(make: Callable[[], object]) -> None:
    TRAIN.unlink()
    make()


def git(*arguments: str) -> None:
    identity = ("-c", "user.name=Agent", "-c", "user.email=agent@localhost")
    subprocess.run(["git", *identity, *arguments], check=False, capture_output=True)


def grandchild() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    clean = {name: value for name, value in os.environ.items() if name != "NIGHTSHIFT_RUN"}
    command = [sys.executable, "-c", code]
    up = subprocess.Popen(command, start_new_session=True, env=clean, stdout=subprocess.PIPE).stdout
    up.readline()


def hang(sign: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sign.touch()
    time.sleep(600)


def actions(hangs: Path) -> dict[str, Callable[[], object]]:
    """What a step can ask for, beside `edit` and `answer`; `hangs` is touched by one that hangs."""
    return {
        "invalid": lambda: TRAIN.write_text("lr = = 1\n"),
        "locked": lambda: TRAIN.write_text(TRAIN.read_text() + "\n[model]\nname = 'mine'\n"),
        "repeat": lambda: edit(rate(0)),
        "hang": lambda: hang(hangs),
        "exit 1": lambda: sys.exit("stand-in: cannot go on"),
        "question": lambda: print("Which of the two files do you mean?"),
        "german": lambda: sys.exit("Etwas ist schiefgelaufen: Nutzungslimit erreicht."),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "exit 137": lambda: sys.exit(137),  # as bwrap ends when its program was killed
        "5 MB": lambda: [os.write(1 + n % 2, b"all work and no play \x1b[31m\n" * 2000) for n in range(109)],
        "link": lambda: replace_config(lambda: TRAIN.symlink_to("/etc/passwd")),
        "fifo": lambda: replace_config(lambda: os.mkfifo(TRAIN)),
        "huge": lambda: TRAIN.write_bytes(b"#" * 200_000),
        "no train.toml": TRAIN.unlink,
        "commit": lambda: (git("add", "--all"), git("commit", "--message", "agent was here"), git("branch", "mine")),
        "results.tsv": lambda: Path("results.tsv").write_text("forged\n"),
        "grandchild": grandchild,
        "link answer": lambda: Path("hypothesis.txt").symlink_to("/etc/hostname"),
        "2 MB": lambda: Path("hypothesis.txt").write_text("HYPOTHESIS: " + 1_999_988 * "x"),
        "long path": lambda: [(Path("d" * 200).mkdir(), os.chdir("d" * 200)) for _ in range(25)],
    }


def main() -> None:
    script = Path(sys.argv[1])
    brief = sys.stdin.read() if len(sys.argv) < 3 else Path(sys.argv[2]).read_text()
    steps = json.loads(script.read_text())
    calls = script.with_suffix(".calls")
    call = int(calls.read_text()) if calls.exists() else 0
    calls.write_text(str(call + 1))
    script.with_suffix(f".brief-{call}").write_text(brief)
    script.with_suffix(f".env-{call}").write_text(json.dumps({**os.environ, "cwd": str(Path.cwd())}))
    step = steps[call] if call < len(steps) else ["edit", "answer"]
    others = actions(script.with_suffix(f".hangs-{call}"))
    for name in step:
        if name == "edit":
            edit(rate(call), call)
        elif name == "answer":
            answer(call, brief)
        else:
            others[name]()


if __name__ == "__main__":
    main()
