"""Last words and costs of agent programs, where tests/unit/test_availability.py has no recorded output of them."""

import json
from pathlib import Path

import pytest

from nightshift.agents.usage import MAX_LOG_BYTES, Log, summary_of
from nightshift.campaign.records import Cost
from tests.agent_outputs import CLAUDE, CODEX, GEMINI
from tests.waiting import assert_linear


@pytest.mark.parametrize(
    ("output", "words", "cost"),
    [
        (CLAUDE, "Raised the rate.", Cost(15_512, 812, 0.4)),
        (f"[{CLAUDE.strip()}]\n", "Raised the rate.", Cost(15_512, 812, 0.4)),  # with --verbose
        (CODEX, "Done: lr is 5e-6.", Cost(26_549, 1_590)),
        (CODEX + CODEX, "Done: lr is 5e-6.", Cost(53_098, 3_180)),  # a command of one's own may ask twice
        (GEMINI, "I halved the batch.", Cost(25_939, 174)),
        ("warning: an old version\n" + GEMINI + "bye\n", "I halved the batch.", Cost(25_939, 174)),
        ("", "", Cost()),
        ("a\x1b[31m\rred\x07\n", "red", Cost()),
        ("{\n not json\n}\n{}\n[]\n[1]\n", "[1]", Cost()),
    ],
)
def test_the_three_formats_and_what_is_none(output: str, words: str, cost: Cost) -> None:
    found = summary_of(output)
    assert found.cost == cost
    assert not words or found.words == words


def result(**fields: object) -> str:
    return json.dumps({"type": "result", **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"total_cost_usd": -1.0},
        {"total_cost_usd": float("nan")},  # no JSON, but Python writes it
        {"total_cost_usd": 1e300},
        {"total_cost_usd": "0.4"},
        {"total_cost_usd": True},
        {"usage": {"input_tokens": -5, "output_tokens": 1e3}},
        {"usage": {"input_tokens": 10**30, "output_tokens": "7"}},
        {"usage": None},
        {"stats": {"models": {"a": 3, "b": {"tokens": {"prompt": -1}}}}},
    ],
)
def test_what_is_no_sane_number_is_not_told(fields: dict[str, object]) -> None:
    assert summary_of(result(**fields) + "\n").cost == Cost()


def test_sums_of_sane_numbers_are_told_whole() -> None:
    """Else a larger bill would hide itself."""

    def line(session: str) -> str:
        usage = {"input_tokens": 9 * 10**9, "output_tokens": 1}
        return result(session_id=session, total_cost_usd=9_000.0, usage=usage) + "\n"

    assert summary_of(line("a") + line("b") + line("a")).cost == Cost(18 * 10**9, 2, 18_000.0)


def test_claudes_total_is_of_its_process_so_far_unless_the_session_is_another() -> None:
    def line(session: object, dollars: float) -> str:
        return result(session_id=session, total_cost_usd=dollars) + "\n"

    assert summary_of(line("a", 0.25) + line("a", 0.75)).cost.dollars == 0.75
    assert summary_of(line("a", 0.25) + line("b", 0.75)).cost.dollars == 1.0
    assert summary_of(line(["a"], 0.25) + line(None, 0.75)).cost.dollars == 0.75  # no name: one session


def test_a_program_that_tells_less_than_the_other_in_one_output_is_no_zero() -> None:
    cost = summary_of(CLAUDE + CODEX).cost
    assert cost == Cost(15_512 + 26_549, 812 + 1_590, 0.4, at_least=("dollars",))


def test_blanks_before_a_line_are_read_over_and_nothing_is_less_than_zero() -> None:
    assert summary_of(" \t" + CLAUDE).cost.dollars == 0.4
    assert str(summary_of(result(total_cost_usd=-0.0)).cost.dollars) == "0.0"


@pytest.mark.parametrize(
    "bomb",
    [
        "[" * 100_000,
        '{"type": "result", "usage": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"type": "result", "total_cost_usd": ' + "9" * 100_000 + "}",
        "{\n" * 60_000,
        "{\n" + '"a": {\n' * 30_000 + "}\n" * 30_000,
    ],
)
def test_bombs_are_nothing(bomb: str) -> None:
    assert summary_of(bomb + "\n").cost == Cost()
    assert summary_of(bomb + "\n" + CODEX).cost == Cost(26_549, 1_590)


def test_the_time_is_bounded_by_what_is_read() -> None:
    assert summary_of(CLAUDE + "x" * MAX_LOG_BYTES).cost == Cost()
    assert_linear(lambda size: summary_of('{"a":\n' * size), 5_000)


def test_the_end_of_a_log_is_known_however_much_was_printed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    with path.open("r+b") as file, path.open("ab", buffering=0) as program:
        log = Log(file)
        log.cut()
        assert log.end == ""
        program.write(b"first\n")
        log.cut()
        assert log.end == "first\n"
        for _ in range(3):
            program.write(b"all work and no play\n" * 100_000)
            log.cut()
            assert path.stat().st_size == MAX_LOG_BYTES
        program.write(CLAUDE[:40].encode())
        log.cut()
        program.write(CLAUDE[40:].encode())
        log.cut()
    assert path.stat().st_size == MAX_LOG_BYTES
    assert path.read_bytes().startswith(b"first\nall work")
    assert len(log.end) <= MAX_LOG_BYTES
    assert summary_of(log.end).cost.dollars == 0.4


def test_the_steps_of_opencode_and_pi_that_were_cut_off_make_the_cost_a_lower_bound() -> None:
    step = json.dumps({"type": "step_finish", "part": {"tokens": {"input": 2, "output": 1}, "cost": 0.5}}) + "\n"
    assert summary_of(step + step).cost == Cost(4, 2, 1.0)
    assert summary_of("x" * MAX_LOG_BYTES + "\n" + step).cost == Cost(
        2, 1, 0.5, at_least=("tokens_in", "tokens_out", "dollars")
    )


def test_the_messages_of_pi_are_counted_once() -> None:
    message = {"role": "assistant", "usage": {"input": 3, "cacheRead": 4, "output": 1, "cost": {"total": 0.25}}}
    ends = json.dumps({"type": "message_end", "message": message}) + "\n"
    assert summary_of(ends * 2).cost == Cost(14, 2, 0.5)  # stopped before its end
    assert summary_of(ends * 2 + json.dumps({"type": "agent_end", "messages": [message] * 3})).cost == Cost(21, 3, 0.75)
