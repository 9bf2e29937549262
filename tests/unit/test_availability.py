"""Why an agent was unavailable: 173 recorded runs of four real programs, their texts and others, and hostile output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nightshift.agents import availability
from nightshift.agents.availability import Availability, Meaning, classify, read_ending
from nightshift.agents.usage import MAX_LOG_BYTES, summary_of
from nightshift.campaign.records import Cost
from tests.agent_outputs import CLAUDE, CODEX, GEMINI
from tests.waiting import assert_linear

DATA = Path(__file__).parents[1] / "data"
RUNS: list[dict[str, Any]] = json.loads((DATA / "agent-runs.json").read_text())
TEXTS: list[dict[str, Any]] = json.loads((DATA / "agent-texts.json").read_text())
OUTPUTS: dict[tuple[str, str], str] = {(run["program"], run["case"]): run["output"] for run in RUNS}
MEANINGS = {
    "usage_limit": "limit",
    "rate_limit": "limit",
    "server_error": "overloaded",
    "malformed": "overloaded network no_edit",  # a broken answer: often nothing shows it
    "ok": "ok no_edit",  # one of them changed nothing
    "refusal": "refused",
}
# Four were stopped by the recorder while they printed nothing at all; the fifth has a text that says nothing.
MISSED_RUNS = {
    ("Claude Code 2.1.197", "auth-text"),  # stopped after 60 of 175 s: the wait that it gets is the one wrong wait
    ("opencode 1.18.33", "usage"),
    ("opencode 1.18.33", "usage-after"),
    ("opencode 1.18.33", "usage-text"),
    ("Claude Code 2.0.14", "plan-seven-day-opus"),  # "No response requested."
    ("Codex CLI 0.169.0", "refusal"),  # exit code 0 and no text
    ("Gemini CLI 0.61.0", "credit-text"),  # a stack trace; the preset prints JSON
}


def is_right(answer: Availability | None, case: dict[str, Any]) -> bool:
    return answer is not None and answer.meaning.name.lower() in MEANINGS.get(case["meaning"], case["meaning"]).split()


def row(kind: str, **fields: object) -> str:
    return json.dumps({"type": kind, **fields}) + "\n"


def test_the_recorded_runs_are_read_right() -> None:
    answers = [(read_ending(run["output"], run["exit_code"], is_edited=run["is_edited"]), run) for run in RUNS]
    assert len(OUTPUTS) == len(RUNS) == 173
    missed = {(run["program"], run["case"]): answer for answer, run in answers if not is_right(answer, run)}
    assert missed.keys() == MISSED_RUNS
    assert not any(answer.is_away and not answer.waits for answer in missed.values()), "the user is not needed"
    assert all(len(answer.text) <= availability.MAX_SHOWN and "\n" not in answer.text for answer, _ in answers)


def test_the_recorded_texts_and_those_of_other_programs_are_read_right() -> None:
    """`source` recorded and bundle: of real programs; reported: from issue trackers; invented: by hand."""
    assert not [case["text"] for case in TEXTS if not is_right(classify(case["text"]), case)]


SENTENCE = "You've hit your usage limit. Please run /login, add credits, and try again at 5:00 AM."
FAILED = row("error", message="Reconnecting... 1/5 (unexpected status 401 Unauthorized)")
WORKED = row("item.completed", item={"type": "command_execution"})


@pytest.mark.parametrize(
    ("output", "exit_code", "meaning"),
    [
        # The text of an ordinary answer, or of a tool, is no error, nor one that the model recovered from.
        (row("result", is_error=False, result=SENTENCE, usage={"output_tokens": 40}), 0, Meaning.NO_EDIT),
        (row("item.completed", item={"type": "agent_message", "text": SENTENCE}), 0, Meaning.NO_EDIT),
        (row("tool_result", status="error", error={"message": SENTENCE}), 0, Meaning.NO_EDIT),
        (f"Error: {SENTENCE}\nSo I left the file as it is.", 0, Meaning.NO_EDIT),
        (FAILED, None, Meaning.LOGIN),
        (FAILED + WORKED, None, Meaning.NO_EDIT),  # slow, and stopped
        ("sh: 1: exec: /opt/agent: not found\n", 127, Meaning.PROGRAM),
        ("PermissionError: [Errno 13] Permission denied: 'x'", 1, Meaning.NO_EDIT),  # of the agent's own script
        ("PermissionError: [Errno 1] Operation not permitted: 'x'", 1, Meaning.NO_EDIT),
        ("Error: EACCES: permission denied, open '/usr/x'", 1, Meaning.NO_EDIT),
        ("Etwas ist schiefgelaufen: Nutzungslimit erreicht.", 1, Meaning.NO_EDIT),  # a language that nobody reads
        ("We are experiencing high load, please use /model to switch", 1, Meaning.OVERLOADED),
    ],
)
def test_what_an_output_means(output: str, exit_code: int | None, meaning: Meaning) -> None:
    assert read_ending(output, exit_code).meaning is meaning
    assert read_ending(output + WORKED, 0, is_edited=True).meaning is Meaning.OK


BOMBS = {
    "deep": '{"error":' * 100_000,
    "one line": "retry after limit: " * 40_000,
    "escapes": "\x1b]" * 300_000,
    "objects": "{\n" + '"a": {\n' * 30_000 + "}\n" * 30_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_the_time_is_bounded_whatever_is_printed(bomb: str) -> None:
    assert len(read_ending(bomb, None).text) <= availability.MAX_SHOWN
    assert summary_of(f"{bomb}\n{CODEX}").cost == Cost(26_549, 1_590)
    assert_linear(lambda size: read_ending(bomb[:size], 1), len(bomb) // 8)


@pytest.mark.parametrize(
    ("output", "words", "cost"),
    [
        ("warning: an old version\n" + GEMINI + "bye\n", "I halved the batch.", Cost(25_939, 174)),
        (CLAUDE + CODEX, "Done: lr is 5e-6.", Cost(15_512 + 26_549, 812 + 1_590, 0.4, at_least=("dollars",))),
        ("a\x1b[31m\rred\x07\n", "red", Cost()),
        (CLAUDE + "x" * MAX_LOG_BYTES, "x" * 297 + "...", Cost()),  # only the end is read
        (CLAUDE + CLAUDE, "Raised the rate.", Cost(15_512, 812, 0.4)),  # a running total of the session
        (CLAUDE + CLAUDE.replace("0b6a9c0e", "b"), "Raised the rate.", Cost(31_024, 1_624, 0.8)),
    ],
)
def test_words_and_costs_of_unusual_outputs(output: str, words: str, cost: Cost) -> None:
    assert summary_of(output) == (words, cost)


@pytest.mark.parametrize("value", [-1, float("nan"), 1e300, 10**30, "4", True, None, {}])
def test_what_is_no_sane_number_is_not_reported(value: object) -> None:
    stats = {"models": {"a": 3, "b": {"tokens": {"prompt": value}}}}
    assert summary_of(row("result", total_cost_usd=value, usage={"input_tokens": value})).cost == Cost()
    assert summary_of(row("result", stats=stats)).cost == Cost()
