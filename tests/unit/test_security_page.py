"""SECURITY.md: what it names exists, and it names every attempt to cheat that is known to succeed."""

import json
import re

from tests.cheats.__main__ import ATTEMPTS
from tests.checkouts import ROOT, names_no_place

PAGE = (ROOT / "SECURITY.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def test_the_page_names_every_attempt_that_is_known_to_succeed() -> None:
    quoted = set(re.findall(r'"([^"]+)"', " ".join(PAGE.split())))
    assert quoted <= {attempt.name for attempt in ATTEMPTS if attempt.expected in ("not defended", "counted")}
    assert quoted >= {attempt.name for attempt in ATTEMPTS if attempt.expected == "not defended"}


def test_the_recorded_attempts_are_these_and_came_to_what_is_expected() -> None:
    attempts = json.loads((RESULTS / "cheats.json").read_text())["attempts"]
    assert all(row["holds"] for row in attempts)
    recorded = {(row["setting"], row["name"], row["expected"]) for row in attempts}
    here = {(attempt.setting, attempt.name, attempt.expected) for attempt in ATTEMPTS}
    assert here - recorded <= {("checkout", "other hardware", "refused")}  # needs two cores


def test_the_recorded_fuzzing_is_of_the_whole_and_nothing_was_wrong() -> None:
    result = json.loads((RESULTS / "fuzz_config.json").read_text())
    assert result["num_wrong"] == 0
    assert sum(row["cases"] for row in result["classes"]) == 1030
    assert all(names_no_place(RESULTS / f"{name}.json") for name in ("cheats", "fuzz_config"))
