"""The documents quote result files, constants and the recorded night: the quotes are compared with their sources."""

import json
import re
from itertools import takewhile
from pathlib import Path
from typing import Any

from nightshift.config.decision_rules import GSM8K_PRIOR_SD, RuleConstants
from tests.checkouts import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def nights(name: str, world: str, rule: str = "kept-set") -> dict[str, Any]:
    """The row of a world and a rule in a file of simulated nights."""
    [row] = [row for row in result(name)["worlds"] if (row["world"], row["rule"]) == (world, rule)]
    return dict(row)


def table_of(page: str, head: str) -> list[str]:
    lines = text_of(page).partition(f"{head}\n")[2].splitlines()
    return list(takewhile(lambda line: line.startswith("|"), lines[1:]))


def test_the_recorded_night_is_the_page_s() -> None:
    readme = " ".join(text_of("README.md").partition("### A recorded night")[2].split())
    page = " ".join(re.sub(r"<[^>]+>", " ", text_of("docs/example-report.html")).split())
    [title] = re.findall(r"\*\*(Better, certified: [^*]+)\.\*\*", readme)
    [certificate] = re.findall(r"(Certified on .+? pp, 95 % interval .+? pp)\.", readme)
    assert title in page
    assert certificate in page


def test_the_gain_of_the_rule_is_quoted_as_it_was_measured() -> None:
    """A row a world in the page of the rule: gain of this rule, 0.2.0 and two simple rules; interval; commits."""
    head = "| world | this rule | 0.2.0 | best | bar | interval holds | in / out | kept | harmful |"
    rows = table_of("docs/decision-rule.md", head)
    assert len(rows) == 12
    for line in rows:
        world = line.split(" | ")[0].removeprefix("| ")
        ours, before = nights("decision_rules_compared", world), nights("decision_rules_0.2.0", world, "0.2.0")
        others = [nights("decision_rules_compared", world, rule)["gain"] for rule in ("best", "bar")]
        assert line == (
            f"| {world} | **{ours['gain']:.2f}** ± {ours['stderr']:.2f} | {before['gain']:.2f} | {others[0]:.2f} | "
            f"{others[1]:.2f} | {before['holds']:.0f} → {ours['holds']:.0f} % | {ours['commits_in']:.0f} / "
            f"{ours['commits_out']:.0f} | {ours['changes']:.0f} | {ours['harmful']:.0f} % |"
        )
    ratio = (
        nights("decision_rules_compared", "default")["gain"]
        / nights("decision_rules_compared", "default", "best")["gain"]
    )
    for page in ("README.md", "docs/using.md"):
        assert re.findall(r"([\d.]+) times\s+the\s+true\s+gain", text_of(page)) == [f"{ratio:.1f}"], page


def test_the_constants_of_the_page_are_those_of_the_rule() -> None:
    page, rules = set(re.findall(r"\d+(?:\.\d+)?", text_of("docs/decision-rule.md"))), RuleConstants()
    factors, priors = zip(*rules.noises, strict=True)
    fractions = (rules.keep_at, rules.revert_below, rules.confirmed_above, rules.examples_share)
    percents = (
        rules.drift_sd,
        rules.seed_sd,
        GSM8K_PRIOR_SD,
        *priors,
        *(abs(part) for kind in rules.kinds for part in kind),
    )
    wanted = {f"{value:g}" for value in (*fractions, *factors, *rules.shrink, *rules.widen)}
    assert wanted | {f"{100 * value:g}" for value in percents} | {f"{100 * rules.least_worth:.2f}"} <= page


def test_no_result_names_a_place_of_a_machine() -> None:
    texts = {path.name: path.read_text() for path in RESULTS.glob("*.json")}
    assert len(texts) > 10
    assert [name for name, text in texts.items() if str(ROOT) in text or str(Path.home()) in text] == []
