"""program.md: everything that it names exists: commands, flags, keys, findings."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nightshift.agents.base import Answer
from nightshift.agents.brief import compose
from nightshift.agents.team import implementation, reflection, strategy
from nightshift.campaign.records import Action, Change, Decision, Judgement, Run
from nightshift.cli.main import commands
from nightshift.cli.output import summary
from nightshift.cli.status import TIMED_OUT
from nightshift.config.allowlist import find_key
from nightshift.errors import ExitCode
from tests.campaigns import a_record, a_result, context_of, replace

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "program.md").read_text()
COMMANDS = re.findall(r"uv run [^`\n]+", TEXT)


def words_of(command: str) -> list[str]:
    return shlex.split(command.removesuffix(" > run.log 2>&1"))[2:]


def test_it_says_early_what_matters_most() -> None:
    assert TEXT.index("**Never stop.**") < TEXT.index("\n## Direction\n") < TEXT.index("\n## Set up\n") < 2_000


def test_flags_of_run_py_exist() -> None:
    described = subprocess.run(
        [sys.executable, ROOT / "run.py", "--help"], capture_output=True, text=True, check=True
    ).stdout
    known = set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", described))
    used = {word for command in COMMANDS for word in words_of(command) if word.startswith("-")}
    used |= set(re.findall(r"`(--[a-z-]+)", TEXT))
    used -= {"--timeout", "--short"}  # of `nightshift wait` and of git
    assert len(used) >= 6
    assert used <= known, used - known


@pytest.mark.parametrize("page", ["README.md", "program.md", "CLAUDE.md", "SECURITY.md"])
def test_the_commands_of_a_page_exist(page):
    text = (ROOT / page).read_text()
    found = re.findall(r"uv run (?:--group dev )?([^`\n]+)", text) + re.findall(r"`(nightshift [^`]+)`", text)
    assert len(found) >= 3
    for command in found:
        program, *rest = shlex.split(command.removesuffix(" > run.log 2>&1"))
        if program == "nightshift":
            options = {option for parameter in commands.commands[rest[0]].params for option in parameter.opts}
            assert {word for word in rest[1:] if word.startswith("-")} <= options, command
        elif program == "pytest":
            assert all((ROOT / word).exists() for word in rest if "/" in word), command
        else:
            assert (ROOT / program).is_file(), command


def test_exit_codes_are_those_of_the_program() -> None:
    table = {int(code): text for code, text in re.findall(r"^\| (\d+) \| ([^|]+) \|", TEXT, re.MULTILINE)}
    assert set(table) == {*map(int, ExitCode), TIMED_OUT}
    assert table[ExitCode.CRASH].startswith("crash")
    assert table[ExitCode.USAGE].startswith("refused")
    assert table[ExitCode.INTERRUPTED].startswith("interrupted")
    assert "still running" in table[TIMED_OUT]


def test_keys_of_the_summary_exist() -> None:
    record = a_record(number=1, status="discard", judgement=Judgement(why="why"), health="time: 1 steps")
    printed = set(re.findall(r"^(\w+):", summary(record), re.MULTILINE))
    [pattern] = re.findall(r"grep -E '\^\(([\w|.]+)\):'", TEXT)
    assert set(pattern.split("|")) <= {*printed, "prediction", "train.toml"}
    known = {"eval_score", "effect_at_decision", "p_helps", "why", "unused_keys", "git", "total_seconds", "num_steps"}
    assert known <= printed
    [sample] = re.findall(r"^```\n(eval_score.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"^(\w+):", sample, re.MULTILINE)) <= {*printed, "scaled"}
    told = replace(record, scaled=("trainer.optim.lr 3e-6 x 50 = 0.00015 on this model",), unused_keys=("a", "b"))
    text = summary(told)
    assert "\nscaled:           trainer.optim.lr 3e-6 x 50 = 0.00015 on this model\nunused_keys:      2: a, b\n" in text
    assert {"scaled", "unused_keys"} <= set(re.findall(r"`(\w+)", TEXT))


def test_the_last_line_says_which_other_changes_left_or_joined() -> None:
    """What run.py leaves in train.toml is then other than before by more keys than those just tried."""
    new, other, rider = (Change(experiment=number, keys={"trainer.optim.lr": f"{number}e-6"}) for number in (4, 3, 2))
    decisions = (
        Decision(change=other, action=Action.REVERT, effect=-0.01, effect_stderr=0.02),
        Decision(change=new, action=Action.KEEP, effect=0.02, effect_stderr=0.01),
    )
    record = a_record(
        number=4, status="keep", parent=1, run=Run(kept=(other,), rider=rider, new=new),
        judgement=Judgement(why="why", decisions=decisions, kept=(new,), expected_score=0.46),
        result=a_result(0.5), prediction="expect +3 pp, faster",
        commits={"revert 0003": "a" * 40, "keep 0004": "b" * 40},
    )  # fmt: skip
    lines = summary(record).splitlines()
    assert lines[-1] == "train.toml:       0003 reverted"
    assert "rider:            0002" in lines
    assert "prediction:       expected +3 pp, measured +4.0 pp, effect +2.0 ± 2.0 pp" in lines
    assert "p_helps:          0.98" in lines
    assert "`train.toml: 0003 reverted, 0005 adopted`" in TEXT
    for without in (replace(record, commits={}), replace(record, judgement=Judgement(why="", decisions=decisions[1:]))):
        assert "train.toml:" not in summary(without), "no commit changed another key"


def test_keys_of_train_toml_are_open() -> None:
    named = set(re.findall(r"`((?:trainer|orchestrator|inference)[.][a-z0-9_.]+)`", TEXT))
    assert len(named) >= 6
    assert [name for name in named if find_key(name) is None] == []


# What Claude Code, Codex and Gemini CLI read by themselves in a checkout: one text, and a night's brief before it

SOURCE = "CLAUDE.md"  # to change them all: change this one and copy it
SKILL = ".claude/skills/nightshift/SKILL.md"
SHARED = (ROOT / SOURCE).read_text()


def test_all_are_made_of_one() -> None:
    assert (ROOT / "GEMINI.md").read_text() == SHARED, f"cp {SOURCE} GEMINI.md"
    head, _, body = (ROOT / SKILL).read_text().removeprefix("---\n").partition("\n---\n\n")
    assert body == SHARED, f"below the front matter of {SKILL} stands {SOURCE}"
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert set(fields) == {"name", "description"}
    assert fields["name"] == (ROOT / SKILL).parent.name
    assert 0 < len(fields["description"]) <= 1024  # the most that Claude Code takes


@pytest.mark.parametrize("page", [SOURCE, "AGENTS.md"])
def test_a_nights_brief_goes_before_them(page: str, tmp_path: Path) -> None:
    text = " ".join((ROOT / page).read_text().split())
    context = context_of(tmp_path, ["3e-6"])
    last = reflection(context.campaign.decided[-1])
    prompts = (compose(context), strategy(context), implementation(context, Answer(None)), last)
    roles = [re.match(r"You are the (\w+) of an overnight campaign", prompt) for prompt in prompts]
    assert [found and found[1] for found in roles] == ["researcher", "strategist", "implementer", "strategist"]
    assert 'begins "You are the researcher", strategist or implementer, "of an overnight campaign"' in text
    assert "says and nothing else" in text
    # It comes before everything that could be taken for a task.
    assert text.index("overnight campaign") < min(text.index("uv run"), 800)
