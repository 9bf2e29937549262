"""The docs and SECURITY.md quote result files and recorded campaigns; here the quotes are compared with them."""

import json
import math
import re
import statistics
from collections import Counter
from itertools import takewhile
from typing import Any

import pytest
from budget_clock import CLOCKS
from nightshift_tictactoe import ratings

from nightshift.config.decision_rules import GSM8K_PRIOR_SD, RuleConstants
from tests.cheats.__main__ import ATTEMPTS, totals
from tests.checkouts import ROOT, names_no_place

RESULTS = ROOT / "benchmarks" / "results"
TASKS = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
RULE_PAGE = (ROOT / "docs" / "decision-rule.md").read_text(encoding="utf-8")
RULE = " ".join(RULE_PAGE.split())


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def row_of(name: str, start: str) -> str:
    """The row of the measured figures that begins with `start` and is remade by `name`."""
    (row,) = (line for line in MEASURED.splitlines() if line.startswith(f"| {start}"))
    assert re.search(rf"`(benchmarks/{name}\.py|python -m tests\.{name})`", row)
    return row.rpartition(" |")[0].rpartition(" | ")[0].split(" | ", 1)[1]


def nights(name: str, world: str, rule: str = "kept-set", **wanted: Any) -> dict[str, Any]:
    """The row of a world and a rule in a file of simulated nights."""
    rows = result(name)["worlds"]
    found = [row for row in rows if (row["world"], row["rule"]) == (world, rule)]
    (row,) = (row for row in found if wanted.items() <= row.items())
    return row


def table_of(page: str, head: str) -> list[str]:
    lines = page.partition(f"{head}\n")[2].splitlines()
    return list(takewhile(lambda line: line.startswith("|"), lines[1:]))


def gain(row: dict[str, Any]) -> str:
    return f"{row['gain']:.2f} ± {row['stderr']:.2f}"


def test_the_path_of_an_experiment_is_the_result_s() -> None:
    counts = [[f"{row[name]:,}" for name in ("files", "functions", "lines")] for row in
              result("path_of_an_experiment")["revisions"]]  # fmt: skip
    quote = "0.2.0: {} files, {} functions of {} lines; now {}, {}, {}".format(*counts[0], *counts[1])
    assert row_of("path_of_an_experiment", "one experiment passes through") == quote


def test_the_recorded_night_is_the_page_s() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").partition("### A recorded night")[2].split())
    page = " ".join(
        re.sub(r"<[^>]+>", " ", (ROOT / "docs" / "example-report.html").read_text(encoding="utf-8")).split()
    )
    [title] = re.findall(r"\*\*(Better, certified: [^*]+)\.\*\*", readme)
    [certificate] = re.findall(r"(Certified on .+? pp, 95 % interval .+? pp)\.", readme)
    [estimate] = re.findall(r"estimate is lower, (.+? pp);", readme)
    for text in (title, certificate, estimate):
        assert text in page, text
    counts = dict(re.findall(r"(kept|discarded|measured again|crashed) (\d+)", page[: page.index("What was kept")]))
    counts = {name: int(number) for name, number in counts.items()}
    assert (
        f"{counts['kept']} kept, {counts['discarded']} discarded, {counts['measured again']} measured again" in readme
    )


def test_the_rule_beside_others() -> None:
    """A row a world: the gain of this rule, 0.2.0 and two simple rules; the interval; the commits."""
    rows = table_of(
        RULE_PAGE, "| world | this rule | 0.2.0 | best | bar | interval holds | in / out | kept | harmful |"
    )
    assert len(rows) == 12
    for line in rows:
        world = line.split(" | ")[0].removeprefix("| ")
        ours = nights("decision_rules_compared", world)
        before = nights("decision_rules_0.2.0", world, "0.2.0")
        others = [nights("decision_rules_compared", world, rule)["gain"] for rule in ("best", "bar")]
        assert line == (
            f"| {world} | **{ours['gain']:.2f}** ± {ours['stderr']:.2f} | {before['gain']:.2f} | {others[0]:.2f} | "
            f"{others[1]:.2f} | {before['holds']:.0f} → {ours['holds']:.0f} % | {ours['commits_in']:.0f} / "
            f"{ours['commits_out']:.0f} | {ours['changes']:.0f} | {ours['harmful']:.0f} % |"
        )


def test_what_the_page_says_of_the_rule() -> None:
    default, before = (nights(name, "default", rule) for name, rule in (
        ("decision_rules_compared", "kept-set"), ("decision_rules_0.2.0", "0.2.0")
    ))  # fmt: skip
    assert f"{before['gain'] - default['gain']:.1f} of {before['gain']:.1f} pp in the default world" in RULE
    without = [nights("decision_rules_compared", world, "no rider") for world in ("default", "half help", "drawn 5")]
    figures = " pp, ".join(f"{row['minus_kept_set']:+.1f} ± {row['minus_stderr']:.1f}" for row in without)
    assert f"**Without riders**: {figures} pp" in RULE
    rows = result("decision_rules")["worlds"]
    holds = [row["holds"] for row in rows]
    told = f"{min(holds):.0f} to {max(holds):.0f} % of {rows[0]['nights']:,} nights in each of {len(rows)} worlds"
    assert told in RULE
    assert told in " ".join(MEASURED.split())
    too_high = {row["world"]: row["told_too_high"] for row in rows}
    assert f"{too_high['nothing helps']:+.1f} pp too high where nothing helps" in RULE
    assert f"{-too_high['drawn 5']:.1f} pp too low in drawn 5" in RULE
    agreements = [night["other settings"]["median"] for name, night in result("agreement").items() if "-0 " in name]
    assert " and ".join(f"{1 - agreement:.2f}" for agreement in agreements) in RULE
    aa = result("aa")
    assert f"{aa['kept']} of {aa['decisions']} runs of one config were kept" in RULE


def test_the_constants_of_the_page() -> None:
    rules = RuleConstants()
    assert f"In at P >= {rules.keep_at:g}, out at P < {rules.revert_below:g}" in RULE
    assert f"P > {rules.confirmed_above:g} is called *confirmed*" in RULE
    assert f"if that is at least {100 * rules.least_worth:.2f} pp" in RULE
    assert f"The drift is N(0, {100 * rules.drift_sd:g} pp)" in RULE
    assert f"with seed_sd = {100 * rules.seed_sd:g} pp" in RULE
    assert f"+ {rules.examples_share:g} p (1 - p) / n" in RULE
    for mean, sd, share in rules.kinds:
        assert f"N({100 * mean:g}, {100 * sd:g})" in RULE
        assert f"({100 * share:g} %)" in RULE
    factors, priors = zip(*rules.noises, strict=True)
    assert ", ".join(f"{factor:g}" for factor in factors[:-1]) + f" and {factors[-1]:g}" in RULE
    assert ", ".join(f"{100 * prior:g}" for prior in priors[:-1]) + f" and {100 * priors[-1]:g} %" in RULE
    less, more, usual = rules.shrink
    assert f"mean minus {less:g} sd" in RULE
    assert f"beyond {usual:g} changes {more:g} sd more" in RULE
    assert f"widened by {rules.widen[0]:g}, at several slots by {rules.widen[1]:g}" in RULE
    assert f"`prior_sd` / {100 * GSM8K_PRIOR_SD:g} pp" in RULE


@pytest.mark.parametrize("page", ["RULE", "MEASURED"])
def test_the_recorded_nights_are_believed_as_they_were_certified(page: str) -> None:
    """Gains, never levels: the test split is another one than the validation split."""
    text = " ".join({"RULE": RULE, "MEASURED": MEASURED}[page].split())
    for night in result("replay")["nights"]:
        low, high = night["certified_interval"]
        assert (
            f"{night['night']} {night['gain']:+.1f} ± {night['half_interval']:.1f} pp, certified "
            f"{night['certified']:+.1f} ({low:+.1f} to {high:+.1f})"
        ) in text


def test_simulated_nights() -> None:
    rows = table_of(MEASURED, "| world | gain | holds | too high | ± told | in / out | kept | harmful | missed |")
    assert len(rows) == len(result("decision_rules")["worlds"]) == 16
    for line, row in zip(rows, result("decision_rules")["worlds"], strict=True):
        missed = "" if row["missed"] is None else f"{row['missed']:.0f} %"
        assert line == (
            f"| {row['world']} | {gain(row)} | {row['holds']:.1f} ± {row['holds_stderr']:.1f} % | "
            f"{row['told_too_high']:+.2f} | {row['half_interval']:.1f} | {row['commits_in']:.1f} / "
            f"{row['commits_out']:.1f} | {row['changes']:.1f} | {row['harmful']:.0f} % | {missed} |"
        )
    ours, best, bar = (nights("decision_rules_compared", "default", rule) for rule in ("kept-set", "best", "bar"))
    for page in ("README.md", "docs/using.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert re.findall(r"([\d.]+) times\s+the\s+true\s+gain", text) == [f"{ours['gain'] / best['gain']:.1f}"], page
    assert row_of("decision_rules", "true gain") == (
        f"{ours['gain']:.2f} pp; keep-above-best {best['gain']:.2f} pp, moving bar {bar['gain']:.2f} pp"
    )


def test_slow_proposers() -> None:
    rows = table_of(MEASURED, "| world | answer | after the run | ahead | runs | holds |")
    assert len(rows) == 6
    for line in rows:
        world, answer = line.removeprefix("| ").split(" | ")[:2]
        seconds = float(answer.removesuffix(" s"))
        after, ahead = (
            nights(f"decision_rules_answers{name}", world, answer_seconds=seconds) for name in ("", "_ahead")
        )
        assert line == (
            f"| {world} | {answer} | {gain(after)} | {gain(ahead)} | {after['runs']:.0f}, {ahead['runs']:.0f} | "
            f"{after['holds']:.0f}, {ahead['holds']:.0f} % |"
        )


def test_bounds_at_four_slots() -> None:
    """Gains are less those of the shipped bounds in the rows of other bounds."""
    worlds = [row["world"] for row in result("decision_rules_4_slots")["worlds"] if row["rule"] == "kept-set"]
    rows = table_of(
        MEASURED,
        "| bounds | default | hard | bad changes | nothing helps | drawn 6 | mean of 15 | commits | harmful | holds |",
    )
    for line in rows:
        bounds = line.removeprefix("| ").split(" | ")[0]
        rule = "kept-set" if bounds == "in 0.6 out 0.5" else bounds
        found = {world: nights("decision_rules_4_slots", world, rule) for world in worlds if world != "arithmetic"}
        cells = [
            f"{row['gain']:.2f}" if rule == "kept-set" else f"{row['minus_kept_set']:+.2f}"
            for row in (found[world] for world in ("default", "hard", "bad changes", "nothing helps", "drawn 6"))
        ]
        mean = statistics.fmean(row["minus_kept_set"] or 0.0 for row in found.values())
        stderr = math.hypot(*(row["minus_stderr"] or 0.0 for row in found.values())) / len(found)
        commits = found["default"]["commits_in"] + found["default"]["commits_out"]
        harmful = statistics.fmean(row["harmful"] for row in found.values())
        holds = [row["holds"] for row in found.values()]
        assert line == (
            f"| {bounds} | {' | '.join(cells)} | {mean:+.2f} ± {stderr:.2f} | {commits:.0f} | {harmful:.1f} % | "
            f"{min(holds):.0f} to {max(holds):.0f} % |"
        )
    assert len(rows) == 6


def test_several_slots() -> None:
    old = {(row["world"], row["slots"]): row for row in result("parallel_nights_0.2.0")["rows"]}
    rows = table_of(MEASURED, "| slots | world | this rule | 0.2.0 | holds | in / out | kept |")
    for line in rows:
        slots, world = line.removeprefix("| ").split(" | ")[:2]
        row = nights("decision_rules" if slots == "1" else f"decision_rules_{slots}_slots", world)
        before = old[world, int(slots)]
        assert line == (
            f"| {slots} | {world} | {gain(row)} | {gain(before)} | {row['holds']:.0f} ± {row['holds_stderr']:.0f} % | "
            f"{row['commits_in']:.0f} / {row['commits_out']:.0f} | {row['changes']:.0f} |"
        )
    assert len(rows) == 6


def test_cheats() -> None:
    data = result("cheats")
    assert data["num_attempts"] == data["num_as_expected"]
    counts = Counter(attempt["measured"] for attempt in data["attempts"])
    quoted = [counts[word] for word in ("refused", "named", "harmless", "not defended")]
    assert list(map(int, re.findall(r"\d+", row_of("cheats", f"{data['num_attempts']} attempts")))) == quoted
    assert "\n".join(totals(data["attempts"])) in MEASURED


def test_certificates_of_equal_configs() -> None:
    rows = result("certificates")["rows"]
    assert {row["campaigns"] for row in rows} == {2000}
    better, covered = [row["better_within"][-1] for row in rows], [row["covered"] for row in rows]
    assert max(better) <= 0.05
    assert min(covered) >= 0.94
    told = row_of("certificates", "certificates of two equal configs")
    assert f"in {100 * min(better):.1f} to {100 * max(better):.1f} % of campaigns" in told
    assert f"holds in {100 * min(covered):.1f} to {100 * max(covered):.1f} %" in told


def test_the_same_config_against_itself() -> None:
    data = result("aa")
    row = row_of("aa", f"{data['decisions']} runs of the unchanged train.toml")
    low, high = (round(100 * share) for share in data["interval_95"])
    assert row == (
        f"kept at once {data['kept']} times, {100 * data['kept_share']:.0f} % (95 % interval {low} to {high}); later "
        f"{data['adopted']} adopted and {data['reverted']} reverted, so that {data['standing']} are kept at the end; "
        f"simulated campaigns keep {100 * data['predicted_share']:.0f} % at once"
    )


def test_faults() -> None:
    data = result("faults")
    families = {each["family"]: each for each in data["families"]}
    struck, wrong = (sum(each[name] for each in families.values()) for name in ("struck", "with_problems"))
    assert not data["findings"]
    assert sum(each["faults"] for each in families.values()) == data["num"]
    row = row_of("faults", f"{data['num']:,} faults")
    assert list(map(int, re.findall(r"\d+", row))) == [struck, wrong]
    assert f"{families['real trl engine']['faults']} of them on the real engine" in MEASURED


def test_mutated_configs() -> None:
    data = result("fuzz_config")
    cases, refused, accepted, wrong = (
        sum(each[name] for each in data["classes"]) for name in ("cases", "refused", "accepted", "wrong")
    )
    row = row_of("fuzz", f"{cases:,} mutated")
    assert list(map(int, re.findall(r"\d+", row))) == [refused, accepted, wrong]
    assert (cases, wrong, data["num_wrong"]) == (1030, 0, 0)
    assert all(names_no_place(RESULTS / f"{name}.json") for name in ("cheats", "fuzz_config"))


def test_overhead() -> None:
    data = result("overhead")
    assert row_of("overhead", "what the harness") == f"{data['experiment']['harness_seconds']:.1f} s"
    assert row_of("overhead", "a typo") == f"{data['refusals']['unknown key']['seconds']:.2f} s"
    few, many = data["commands"]
    assert [size["num_experiments"] for size in data["commands"]] == [10, 1000]
    dry_run, status, history, report = (many[name]["seconds"] for name in ("dry-run", "status", "history", "report"))
    assert row_of("overhead", "the page") == f"{report:.1f} s, {many['report_mb']:.1f} MB"
    more = many["experiment"]["harness_seconds"] - few["experiment"]["harness_seconds"]
    assert row_of("overhead", "after 1,000") == (
        f"dry-run {dry_run:.1f} s, status {status:.1f} s, history {history:.1f} s, page {report:.1f} s; "
        f"an experiment takes {more:.1f} s more than after 10"
    )


def test_the_head_of_many_slots() -> None:
    data = result("head")
    most = data["rows"][-1]
    assert [row["slots"] for row in data["rows"]] == [1, 4, 16, 64]
    assert row_of("head_load", "a night with 64 slots") == (
        f"its head takes {most['wall_seconds_each']:.2f} s an experiment ({most['cpu_seconds_each']:.2f} s of CPU) and "
        f"{most['peak_mb']} MB: alone it keeps up with {most['keeps_up_to']:,} slots whose runs take "
        f"{data['run_seconds']:.0f} s"
    )


def test_steps_of_the_embedded_trainer() -> None:
    _, old, plain = result("trainer_steps")["summary"]
    row = row_of("trainer_steps", "steps of the embedded trainer")
    of = {name: f"({one['least']:.2f} to {one['most']:.2f})" for name, one in (("old", old), ("plain", plain))}
    assert row == (
        f"{old['times_here']:.2f} times 0.2.0 {of['old']}, "
        f"{plain['times_here']:.2f} times plain trl.GRPOTrainer {of['plain']}"
    )
    assert result("trainer_steps")["against"].startswith("c6f9e29"), "0.2.0"


def test_where_the_time_goes() -> None:
    data = result("where_the_time_goes")
    seconds = data["seconds"]
    start, score = (f"{seconds[name]:.1f}" for name in ("start-up of the trainer", "evaluation"))
    row = row_of("where_the_time_goes", f"share of an experiment that is training, {data['budget_seconds']:.0f} s")
    share = f"{100 * data['shares']['training']:.0f} %"
    assert row == f"{share}; {start} s start the trainer, {score} s score 4,000 problems"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("default", "as shipped"),
        ("lr*3", "learning rate x3"),
        ("lr*6+max_rl", "learning rate x6, max_rl"),
        ("less_easy", "pools: what was right in each rollout is drawn a quarter as often"),
        ("lr/3", "learning rate /3"),
        ("group16", "group_size 16 instead of 4"),
        ("temp0.7", "temperature 0.7 instead of 1.0"),
    ],
)
def test_the_slope_of_the_embedded_task(setting: str, words: str) -> None:
    data = result("arithmetic_slope")["settings"]
    run = data[setting]
    assert f"| {words} | {run['mean']:.3f} | {run['sd']:.3f} | {run['steps']:.0f} |" in MEASURED
    assert all(f"scores {data['base']['mean']:.3f}" in page for page in (TASKS, MEASURED))
    told = " ".join(TASKS.split())
    best = data["lr*6+max_rl"]["mean"]
    assert f"{data['default']['mean']:.3f} of it with train.toml as shipped, and {best:.3f} with six times" in told


@pytest.mark.parametrize(
    ("name", "other", "words"), [("countdown", "lr/3", "a third of"), ("tictactoe", "lr*3", "three times")]
)
def test_the_slope_of_other_environments(name: str, other: str, words: str) -> None:
    base, shipped, changed = (result(f"{name}_slope")["settings"][setting] for setting in ("base", "default", other))
    told = " ".join(MEASURED.split())
    assert f"{base['mean']:.3f} before training, {shipped['mean']:.3f} as shipped (three seeds, standard" in told
    assert f"deviation {shipped['sd']:.3f}, {shipped['steps']:.0f} steps), {changed['mean']:.3f} with {words}" in told
    assert f"{words} the learning rate ({changed['sd']:.3f})" in told


def test_what_seeds_are_worth() -> None:
    data, told = result("seeds"), " ".join(MEASURED.split())
    same, other = ([100 * data[name][of] for name in ("lr*1.5", "batch128", "group8")] for of in ("same", "different"))
    assert {data[name]["seeds"] for name in ("lr*1.5", "batch128", "group8")} == {10}
    assert f"differ by {same[0]:.1f} pp (standard deviation) with the same seed, by {other[0]:.1f} pp with" in told
    assert f"it is {same[1]:.1f} and {same[2]:.1f} pp with the same, {other[1]:.1f} and {other[2]:.1f} pp with" in told
    assert f"a part of the {same[0]:.1f} pp may be" in told


def test_the_ratings_of_a_game_and_what_another_would_cost() -> None:
    data, told = result("game"), " ".join((ROOT / "docs" / "environments.md").read_text(encoding="utf-8").split())
    assert f"by bootstrap over the openings, is about {data['elo_stderr_mean']:.0f}; one policy's ratings over" in told
    assert len(data["sets"]) == 8
    assert f"eight other sets of 100 openings had a standard deviation of {data['elo_sd_over_sets']:.0f} (" in told
    assert f"On a CPU it costs {data['seconds_a_set']:.1f} s a step" in told
    ours, other = (data["tokens_of_a_board"][name] for name in ("tic-tac-toe", "connect four"))
    assert (
        f"A board is {other} of the tiny model's tokens, not {ours}, so a seat's game grows to {21 * other:,};" in told
    )
    late, early = (data["turn_milliseconds"][place] for place in ("750", "20"))
    assert f"a turn after 750 tokens costs {late:.0f} ms of one core, not {early:.1f}." in told
    assert f"{data['num_games']:,} are eleven minutes of evaluation, not {data['seconds_a_set']:.0f} s," in told
    assert data["num_games"] * 21 * late / 1000 == pytest.approx(660, rel=0.05)
    assert f"random = {ratings.ELO['random']:,}, perfect = {ratings.ELO['perfect']:,})" in told


def test_the_clock_of_the_embedded_budget() -> None:
    data, told = result("budget_clock"), " ".join(MEASURED.split())
    wall, cpu, wall_scaled, cpu_scaled = (f"{data['spread'][name]:.0%}".replace("%", " %") for name in CLOCKS)
    assert f"wall-clock time spread by {wall} (standard deviation over mean), of CPU time by {cpu}, of" in told
    assert f"calibration kernel by {wall_scaled}, of CPU time scaled by it by {cpu_scaled}." in told

    def mean(setting: str) -> float:
        return statistics.mean(run["cpu"] for name, run in data["steps"].items() if name.startswith(f"{setting}-"))

    faster, usual = ([f"{mean(f'{name}-{loops}'):.0f}" for loops in (0, 4)] for name in ("batch128", "default"))
    assert f"batch_size 128 makes {faster[0]} in calm and {faster[1]} beside four loops, 256 makes " in told
    assert f"256 makes {usual[0]} and {usual[1]} (" in told


def test_faults_of_nights() -> None:
    faults = result("night_faults")["faults"]
    nights = {each["night"] for each in faults}
    start = f"{len(faults)} faults in {len(nights)} nights with four runs"
    assert row_of("faults.nights", start).startswith(f"{sum(len(each['problems']) for each in faults)} left a process")


def test_what_is_proposed() -> None:
    data, told = result("proposals"), " ".join(MEASURED.split())
    schedules, errors = data["schedules"], data["throughput"]
    for text in (
        f"{data['proposals']} proposals: {data['keys_mean']:.1f} keys each, {100 * data['far_worse']:.0f} % more than",
        f"{100 * data['decaying']:.0f} % let the learning rate decay",
        f"{schedules['used_median']:.2f} of the budget (tenth percentile {schedules['used_10']:.2f})",
        f"and {data['cut_before_decay']} are cut before their decay begins.",
        f"{100 * errors['median']:.0f} % in the median, {100 * errors['90 %']:.0f} % for nine of ten",
    ):
        assert text in told


def test_proposers_in_the_emulator() -> None:
    ranking = result("proposers")
    rows = table_of(MEASURED, "| proposer | rider | gain | by the rider | lead over random | holds | in / out | kept |")
    assert len(rows) == len(ranking["summary"]) == 6
    for line, row in zip(rows, ranking["summary"], strict=True):
        by_rider, lead = (
            "" if row[name] is None else f"{row[name]:+.2f} ± {row[f'{name}_stderr']:.2f}"
            for name in ("by_rider", "lead")
        )
        assert line == (
            f"| {row['proposer']} | {'yes' if row['rider'] else 'no'} | {row['gain']:.2f} ± {row['gain_stderr']:.2f} | "
            f"{by_rider} | {lead} | {row['holds']:.0f} ± {row['holds_stderr']:.0f} % | {row['commits_in']:.1f} / "
            f"{row['commits_out']:.1f} | {row['changes']:.1f} |"
        )
    told = " ".join(MEASURED.split())
    assert f"{ranking['emulator_explains']:.2f} of the variance" in told
    assert f"{ranking['summary'][0]['nights']} nights of 40 runs" in told
    rows_before = [row for row in result("proposers_0.2.0")["rows"] if row["landscape"] == "emulator"]
    gains = [
        statistics.fmean(
            row["gain"]
            for row in rows_before
            if row["proposer"] == proposer and row["night"] < ranking["summary"][0]["nights"]
        )
        for proposer in ("search", "tpe", "random")
    ]
    assert (
        "0.2.0 made {:.2f}, {:.2f} and {:.2f} pp with search, tpe and random in the same nights".format(*gains) in told
    )


def test_the_search_with_optuna_against_the_one_with_botorch() -> None:
    compared = result("proposers_botorch")
    leads = [row["search"] - row["botorch"] for row in compared["rows"]]
    stderr = statistics.stdev(leads) / math.sqrt(len(leads))
    assert compared["nights"] == len(leads)
    told = f"In {len(leads)} nights with riders it gains {statistics.fmean(leads):.1f} ± {stderr:.1f} pp more than the"
    assert told in " ".join(MEASURED.split())


def test_both_agents_of_the_comparison_are_recorded() -> None:
    nights = {night["name"]: night for night in result("recorded_nights")["nights"]}
    assert nights.keys() == {"random-0", "tpe-0"}
    assert {night["experiments"] for night in nights.values()} == {30}
    quoted = re.findall(r"[\d.]+", row_of("agents", "30 experiments"))
    told = []
    for name in ("tpe-0", "random-0"):
        night = nights[name]
        scores = [night["baseline, fresh seeds"], night["incumbent, fresh seeds"]]
        told += [f"{score:.3f}" for score in scores] + [f"{100 * night['difference']:.1f}"]
        told += ["95"] * (name == "tpe-0") + [f"{100 * bound:.1f}" for bound in night["95 % interval"]]
    assert quoted == told


SECURITY = (ROOT / "SECURITY.md").read_text()


def test_the_page_names_every_attempt_that_is_known_to_succeed() -> None:
    quoted = set(re.findall(r'"([^"]+)"', " ".join(SECURITY.split())))
    assert quoted <= {attempt.name for attempt in ATTEMPTS if attempt.expected in ("not defended", "counted")}
    assert quoted >= {attempt.name for attempt in ATTEMPTS if attempt.expected == "not defended"}


def test_the_recorded_attempts_are_these_and_came_to_what_is_expected() -> None:
    attempts = json.loads((RESULTS / "cheats.json").read_text())["attempts"]
    assert all(row["holds"] for row in attempts)
    recorded = {(row["setting"], row["name"], row["expected"]) for row in attempts}
    here = {(attempt.setting, attempt.name, attempt.expected) for attempt in ATTEMPTS}
    assert here - recorded <= {("checkout", "other hardware", "refused")}  # needs two cores
