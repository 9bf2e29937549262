"""program.md followed to the letter by a shell script that knows nothing else, with the stand-in engine.

Its commands are those of program.md, found in its steps and code blocks and run in their order; what it does after each
is what the table of exit codes says. Only the blanks are filled in: the tag, a number, hypotheses, edits of train.toml.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkouts import ROOT, git
from tests.night_checkout import leftovers, problems, records
from tests.waiting import wait_for

TEXT = (ROOT / "program.md").read_text()
HYPOTHESIS = '"<hypothesis>: expect <prediction>"'
# What `uv run` is here: no environment is made, and the trainer is a stand-in.
UV = """#!/bin/sh
[ "$1" = run ] || exit 64
program=$2
shift 2
case $program in
run.py) exec {python} {stand_in} "$PWD" "$@" ;;
prepare.py) exec {python} prepare.py "$@" ;;
*) exec "$program" "$@" ;;
esac
"""


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}")[2].partition("\n## ")[0]


def commands(text: str) -> list[str]:
    """In their order: lines of code blocks, and what stands between backticks and begins with a program."""
    found = re.findall(r"^ {4,}((?:uv run|grep) .+)$|`((?:uv run|git|grep|tail) [^`]+)`", text, re.MULTILINE)
    return [block or inline for block, inline in found]


def table() -> dict[int, str]:
    """What is done after an exit code."""
    return {int(code): does for code, does in re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+) \|", TEXT, re.MULTILINE)}


class Shell:
    """The agent. `said`: stdout of its last command."""

    def __init__(self, root: Path, tools: Path) -> None:
        self.root, self.said, self.path = root, "", str(tools)
        tools.mkdir()
        uv = tools / "uv"
        uv.write_text(UV.format(python=sys.executable, stand_in=ROOT / "tests" / "stand_in_run.py"))
        uv.chmod(0o755)

    def run(self, command: str) -> int:
        script = f'export PATH={shlex.quote(self.path)}:"$PATH"\n{command}'
        done = subprocess.run(["sh", "-c", script], cwd=self.root, stdout=subprocess.PIPE, text=True, check=False)
        self.said = done.stdout
        return done.returncode

    def log(self) -> str:
        return (self.root / "run.log").read_text()

    def edit(self, rate: str) -> None:
        text = (self.root / "train.toml").read_text()
        (self.root / "train.toml").write_text(re.sub(r"lr = \S+", f"lr = {rate}", text))


@pytest.mark.slow
def test_experiments_by_the_letter(root: Path, tmp_path: Path) -> None:
    git(root, "switch", "--quiet", "-C", "main")
    agent, does = Shell(root, tmp_path / "tools"), table()
    status, keys, prepare, baseline = commands(section("Set up"))
    steps, waits = section("One experiment").split("Many tools cut a call off")
    history, show, dry_run, run, last_line, read = commands(steps)
    detach, wait = commands(waits.partition("| exit code")[0])

    assert (agent.run(status), agent.said) == (0, "")
    assert (agent.run(keys), "trainer.optim.lr" in agent.said) == (0, True)
    assert agent.run(prepare) == 0
    code = agent.run(baseline)
    assert (code, does[code]) == (0, "read the result, go on"), agent.log()

    # The first: looked up, checked, refused as a repetition at first, corrected, measured.
    assert (agent.run(history), "untried keys" in agent.said) == (0, True), agent.said
    assert (agent.run(show.replace("<number>", "1")), "baseline" in agent.said) == (0, True)
    code = agent.run(dry_run)
    assert (code, does[code]) == (2, "correct what the line names")
    agent.edit("3e-6")
    guide = agent.root / "program.md"
    text = guide.read_text()
    for scope, expected in (("trainer.scheduler", 2), ("trainer.optim.lr", 0)):  # the user's direction is enforced
        guide.write_text(f"## Direction\nOnly: {scope}\n")
        assert (agent.run(dry_run), scope) == (expected, scope)
    guide.write_text(text)
    assert agent.run(dry_run) == 0
    assert re.search(r"^time: +at most \d+ (s|min|h)", agent.said, re.MULTILINE)
    code = agent.run(run.replace(HYPOTHESIS, '"rate five times as high: expect +5 pp, faster"'))
    assert (code, does[code]) == (0, "read the result, go on"), agent.log()
    assert agent.run(read) == 0
    names = {line.partition(":")[0] for line in agent.said.splitlines()}
    assert names >= {"eval_score", "effect_at_decision", "verdict"}

    # The second: it outlasts every call.
    held = agent.root / "stand-in.json"
    held.write_text(json.dumps({"fault": "hold"}))
    agent.edit("5e-6")
    assert agent.run(detach.replace(HYPOTHESIS, '"between the two: it is smoother"')) == 0
    assert wait.partition(" >")[0] in agent.said  # the program says the same
    short = wait.replace("--timeout 100", "--timeout 1")
    code = agent.run(short)
    assert (code, does[code]) == (124, "wait again"), agent.log()
    held.unlink()
    while (code := agent.run(short)) == 124:
        pass
    assert (code, does[code]) == (0, "read the result, go on"), agent.log()
    assert agent.run(read) == 0
    assert (agent.run(last_line), agent.said.strip() != "") == (0, True)

    ours = records(agent.root)
    assert [record.status in ("keep", "discard") for record in ours] == [True] * 3
    descriptions = ["rate five times as high: expect +5 pp, faster", "between the two: it is smoother"]
    assert [record.proposal.description for record in ours[1:]] == descriptions
    assert [record.proposal.prediction for record in ours] == [None, "expect +5 pp, faster", None]
    (agent.root / "run.log").unlink()  # the real .gitignore has it
    assert problems(agent.root) == []
    wait_for(lambda: leftovers(agent.root) == [])  # the detached controller ends a moment after its verdict
    assert git(agent.root, "status", "--short", "--untracked-files=no") == ""
