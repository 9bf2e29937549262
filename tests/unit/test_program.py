"""program.md: everything that it names exists: commands, flags, keys, findings."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from nightshift.agents.base import Answer
from nightshift.agents.brief import compose
from nightshift.agents.team import implementation, strategy
from nightshift.cli.main import commands
from nightshift.cli.output import summary
from nightshift.cli.status import TIMED_OUT
from nightshift.config.allowlist import find_key
from nightshift.errors import ExitCode
from tests.campaigns import context_of, judged, replace

ROOT = Path(__file__).parents[2]
RUN = runpy.run_path(str(ROOT / "run.py"))["main"]
TEXT = (ROOT / "program.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "program.md", "CLAUDE.md", "SECURITY.md"])
def test_the_commands_of_a_page_exist(page):
    text = (ROOT / page).read_text()
    found = re.findall(r"uv run (?:--group dev )?([^`\n]+)", text) + re.findall(r"`(nightshift [^`]+)`", text)
    assert len(found) >= 3
    for command in found:
        program, *rest = shlex.split(command.removesuffix(" > run.log 2>&1"))
        if program in ("nightshift", "run.py"):
            called = RUN if program == "run.py" else commands.commands[rest[0]]
            options = {option for parameter in called.params for option in parameter.opts}
            assert {word for word in rest if word.startswith("-")} <= options, command
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
    record = replace(judged([0.5, 0.4])[1], health="time", git_action="done", total_seconds=9.0, unused_keys=("a", "b"))
    printed = set(re.findall(r"^(\w+):", summary(record), re.MULTILINE))
    [pattern] = re.findall(r"grep -E '\^\(([\w|.]+)\):'", TEXT)
    assert set(pattern.split("|")) <= {*printed, "scaled", "strict_score", "train.toml"}
    assert "`train.toml: 0003 reverted, 0005 kept later`" in TEXT
    known = {"eval_score", "effect_at_decision", "p_helps", "why", "unused_keys", "git", "total_seconds", "num_steps"}
    assert known <= printed
    [sample] = re.findall(r"^```\n(eval_score.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"^(\w+):", sample, re.MULTILINE)) <= {*printed, "scaled"}
    told = replace(record, scaled=("trainer.optim.lr 3e-6 x 50 = 0.00015 on this model",))
    text = summary(told)
    assert "\nscaled:           trainer.optim.lr 3e-6 x 50 = 0.00015 on this model\n" in text
    assert "\nunused_keys:      the engine trl does not use a, b\n" in text
    assert {"scaled", "unused_keys"} <= set(re.findall(r"`(\w+)", TEXT))


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
    prompts = (compose(context), strategy(context), implementation(context, Answer(None)))
    roles = [re.match(r"You are the (\w+) of an overnight campaign", prompt) for prompt in prompts]
    assert [found and found[1] for found in roles] == ["researcher", "strategist", "implementer"]
    assert 'begins "You are the researcher of an overnight campaign", or the strategist or the implementer' in text
    assert "says and nothing else" in text
    # It comes before everything that could be taken for a task.
    assert text.index("overnight campaign") < min(text.index("uv run"), 800)
