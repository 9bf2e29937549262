"""What Claude Code, Codex and Gemini CLI read by themselves in a checkout: one text, and a night's brief before it."""

import re
from pathlib import Path

import pytest

from nightshift.agents.base import Answer
from nightshift.agents.brief import compose
from nightshift.agents.team import implementation, reflection, strategy
from tests.campaigns import context_of

ROOT = Path(__file__).parents[2]
SOURCE = "CLAUDE.md"  # to change them all: change this one and copy it
SKILL = ".claude/skills/nightshift/SKILL.md"
TEXT = (ROOT / SOURCE).read_text()


def test_all_are_made_of_one() -> None:
    assert (ROOT / "GEMINI.md").read_text() == TEXT, f"cp {SOURCE} GEMINI.md"
    head, _, body = (ROOT / SKILL).read_text().removeprefix("---\n").partition("\n---\n\n")
    assert body == TEXT, f"below the front matter of {SKILL} stands {SOURCE}"
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
