"""README and docs quote result files and recorded campaigns; here the quotes are compared with them."""

import dataclasses
import json
import re
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from nightshift_tictactoe import ratings

from tests.cheats.__main__ import totals
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import recorded  # noqa: E402
import replay as replays  # noqa: E402
from budget_clock import CLOCKS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
USING = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
TASKS = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
RULE_LINES = (ROOT / "docs" / "decision-rule.md").read_text(encoding="utf-8").splitlines()
RULE = " ".join(" ".join(RULE_LINES).split())


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def row_of(name: str, start: str) -> str:
    """The row of the measured figures that begins with `start` and is remade by `name`."""
    (row,) = (line for line in MEASURED.splitlines() if line.startswith(f"| {start}"))
    assert re.search(rf"`(benchmarks/{name}\.py|python -m tests\.{name})`", row)
    return row.rpartition(" |")[0].rpartition(" | ")[0].split(" | ", 1)[1]


def test_simulated_nights() -> None:
    data = result("decision_rules")
    ours, seed, all_problems = (
        data["rules"][name] for name in ("ours", "keep above best, n=200", "keep above best, n=1319")
    )
    gains = [f"{rule['gain']:.2f}" for rule in (ours, seed, all_problems)]
    assert re.findall(r"[\d.]+(?= pp)", row_of("decision_rules", "true gain")) == gains
    ends = [f"{100 * rule['ends_worse']:.0f}" for rule in (ours, seed)]
    assert re.findall(r"\d+(?= %)", row_of("decision_rules", "simulated nights")) == ends
    errors = data["calibration_error"]["ours"]
    quoted = [f"{100 * errors[world]:.0f}" for world in ("default", "hard")]
    assert re.findall(r"by (\d+)", row_of("decision_rules", "`p_better`")) == quoted


def test_the_lead_over_keep_above_best() -> None:
    gains = {(row["world"], row["rule"]): row["gain"] for row in result("decision_rules_compared")["worlds"]}
    ratio = f"{gains['default', 'kept-set'] / gains['default', 'best']:.1f}"
    assert re.findall(r"([\d.]+) times", README) == re.findall(r"([\d.]+) times", USING) == [ratio]


def test_the_rule_and_where_it_fails() -> None:
    data, aa = result("decision_rules"), result("aa")
    gains, intervals = data["gains"], data["interval"]
    ours, errors = data["rules"]["ours"], data["calibration_error"]["ours"]
    names = ("ours", "keep above best, n=200", "keep above best, n=1319", "moving bar, n=1319")
    gain, few, many, bar = (f"{data['rules'][name]['gain']:.2f} pp" for name in names)
    assert f"of a night: {gain}. Keeping what scores above the best: {few} on 200 examples, {many} on all" in RULE
    assert f"in two lines, makes {bar}, and {gains['moving bar, n=1319']['hard']:.2f} in the hard world" in RULE
    assert f"60 s instead of 15 makes {gains['ours']['agent 60 s']:.2f} pp" in RULE
    assert f"{100 * ours['missed']:.0f} % of the ideas that are worth" in RULE
    assert f"{100 * ours['kept_worse']:.0f} % of the keeps are worse" in RULE
    assert f"A keep is taken back {ours['taken_back']:.1f} times a night" in RULE
    assert f"{aa['kept']} times of {aa['decisions']} on the real engine" in RULE
    assert f"it is never kept: {aa['kept_as_equal_settings']} of {aa['decisions']}" in RULE
    assert f"ends {-gains['ours']['helpful 0%']:.2f} pp worse" in RULE
    off = [round(100 * errors[world]) for world in ("helpful 0%", "hard", "helpful 50%", "default")]
    assert list(map(int, re.findall(r"(?:off by|help by|world by) (\d+)", RULE))) == off
    too_high = (f"{intervals['ours'][world]['bias']:.1f}" for world in ("default", "helpful 10%"))
    assert "by {} pp in the default world, by {} where a tenth".format(*too_high) in RULE


def test_the_worlds_of_the_rule() -> None:
    """A row a world: gains of ours, by hand, version 0.1.0's and the oracle's; how often the interval holds; width."""
    data = result("decision_rules")
    one, rules = "version 0.1.0", ("ours", "ours, on the incumbent", "version 0.1.0", "oracle")
    told = {
        row.split("|")[1].strip(): re.findall(r"-?[\d.]+", row.split("|", 2)[2])
        for row in RULE_LINES
        if row.startswith("| ")
    }
    worlds = [world for world in data["gains"]["ours"] if world in told]
    assert len(worlds) == 16
    for world in worlds:
        ours, single = (data["interval"][rule][world] for rule in ("ours", one))
        gains = [f"{data['gains'][rule][world]:.2f}" for rule in rules]
        shares = [f"{100 * each['coverage']:.1f}" for each in (ours, single)]
        assert told[world] == [*gains, *shares, *(f"{each['width']:.2f}" for each in (ours, single))], world
    holds = {world: round(100 * each["coverage"]) for world, each in data["interval"]["ours"].items()}
    none = holds.pop("helpful 0%")
    low, high = min(holds.values()), max(holds.values())
    assert f"holds in {none} % of nights**; in every other world of the command in {low} to {high} %" in RULE
    page = (ROOT / "nightshift" / "report" / "templates" / "report.html.j2").read_text(encoding="utf-8")
    assert f"held the truth in {low} to {high} % of cases, but in {none} % where no idea helps" in page


@pytest.mark.parametrize("name", ["random-0", "tpe-0"])
def test_the_recorded_nights_are_believed_as_they_were_certified(name: str) -> None:
    """Gains, never levels: the sealed set is another one than the selection set."""
    records, constants = recorded.records(name), ARITHMETIC_TRL.decision
    today = {field.name: getattr(constants, field.name) for field in dataclasses.fields(constants)}
    then, now = (replays.replay(records, changes).standing for changes in ({}, today))
    (night,) = (night for night in result("recorded_nights")["nights"] if night["name"] == name)
    assert now.difference == pytest.approx(night["difference"], abs=0.03)
    believed, certified = (f"{100 * value:+.1f}" for value in (now.difference, night["difference"]))
    assert re.search(
        rf"{name} (?:is believed )?{re.escape(believed)} pp[^.]*?certified {re.escape(certified)} pp", RULE
    )
    assert f"{100 * then.difference:+.1f}" in RULE.partition("dragged a good parent down")[2][:40]
    if name == "random-0":
        low, high = (f"{100 * bound:+.1f}" for bound in night["95 % interval"])
        assert f"certified {certified} pp (95 % interval {low} to {high})" in RULE


def test_the_rule_is_told_with_its_constants() -> None:
    for name, unit in (("prior_sd", ", the unit of effects"), ("seed_sd", " with seed_df = 8"), ("take_back", "")):
        values = [f"{100 * getattr(rules.decision, name):.4g}" for rules in (GSM8K_PRIME_RL, ARITHMETIC_TRL)]
        told = re.findall(rf"\| {name}{unit} \| ([\d.]+) pp \| ([\d.]+) pp \|", RULE)
        assert [float(value) for value in told[0]] == [float(value) for value in values]
    assert GSM8K_PRIME_RL.decision.seed_df == 8
    rules = GSM8K_PRIME_RL.decision
    weights, *kinds = (line.split("|")[1:-1] for line in RULE_LINES if re.match(r"\| (kind|\w+ N\()", line))
    assert [float(re.findall(r"[\d.]+", cell)[0]) / 100 for cell in weights[1:]] == [one for one, _ in rules.priors]
    for (kind, *shares), told, *expected in zip(kinds, rules.kinds, *(of for _, of in rules.priors), strict=True):
        assert f"N({told[0]:g}, {told[1]:g})" in kind
        assert [float(share.strip(" %")) for share in shares] == pytest.approx([100 * one for one in expected])
    assert len(rules.priors) * len(rules.noises) == 18


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
    assert data["predicted_inside"]
    row = row_of("aa", f"the unchanged train.toml tried {data['decisions']} times")
    shares = [data["kept_share"], 0.95, *data["interval_95"]]
    percent = [round(100 * share) for share in shares]
    told = [data["kept"], *percent, data["taken_back"], round(100 * data["predicted_share"])]
    assert list(map(int, re.findall(r"\d+", row))) == told


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


def test_where_the_time_goes() -> None:
    data = result("where_the_time_goes")
    seconds = data["seconds"]
    start, score = (f"{seconds[name]:.1f}" for name in ("start-up of the trainer", "evaluation"))
    row = row_of("where_the_time_goes", f"share of an experiment that is training, {data['budget_seconds']:.0f} s")
    share = f"{100 * data['shares']['training']:.0f} %"
    assert row == f"{share}; {start} s start the trainer, {score} s score 1,000 problems"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("default", "as shipped"),
        ("lr*3", "learning rate x3"),
        ("lr/3", "learning rate /3"),
        ("group16", "group_size 16 instead of 4"),
        ("batch1024", "batch_size 1024 instead of 256"),
        ("temp0.7", "temperature 0.7 instead of 1.0"),
    ],
)
def test_the_slope_of_the_embedded_task(setting: str, words: str) -> None:
    data = result("arithmetic_slope")["settings"]
    run = data[setting]
    assert f"| {words} | {run['mean']:.3f} | {run['sd']:.3f} | {run['steps']:.0f} |" in MEASURED
    assert all(f"scores {data['base']['mean']:.3f}" in page for page in (TASKS, MEASURED))
    told = " ".join(TASKS.split())
    assert f"{data['default']['mean']:.3f} of it with train.toml as shipped, and {data['lr*3']['mean']:.3f}" in told


@pytest.mark.parametrize(
    ("name", "other", "words"), [("countdown", "lr/3", "a third of"), ("tictactoe", "lr*3", "three times")]
)
def test_the_slope_of_other_environments(name: str, other: str, words: str) -> None:
    base, shipped, changed = (result(f"{name}_slope")["settings"][setting] for setting in ("base", "default", other))
    told = " ".join(MEASURED.split())
    assert f"{base['mean']:.3f} before training, {shipped['mean']:.3f} as shipped (five seeds, standard" in told
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
    data, loaded, told = result("proposals"), result("proposals_loaded"), " ".join(MEASURED.split())
    calm, busy = data["throughput, calm"], loaded["throughput, busy"]
    for text in (
        f"{data['proposals']} proposals: {data['keys_mean']:.1f} keys each, {100 * data['far_worse']:.0f} % more than",
        f"{100 * data['decaying']:.0f} % let the learning rate decay",
        f"{data['calm']['used_median']:.2f} of the budget (tenth percentile {data['calm']['used_10']:.2f})",
        f"and {data['cut_before_decay']} are cut before their decay begins.",
        f"{100 * calm['median']:.0f} % in the median, {100 * calm['90 %']:.0f} % for nine of ten",
        f"on both cores of {100 * busy['median']:.0f} %, and its schedules used {loaded['busy']['used_median']:.2f} of",
    ):
        assert text in told
    ranking = result("proposers")
    for row in ranking["summary"]:
        lead, stderr = ("", "") if row["proposer"] == "random" else (f"{row['lead']:+.2f}", f"{row['lead_stderr']:.2f}")
        line = (
            f"| {row['landscape']} | {row['proposer']} | {row['gain']:.2f} | {row['stderr']:.2f} | {lead} | {stderr} |"
        )
        assert f"{line} {100 * row['far_worse']:.0f} % | {row['used_median']:.2f} |\n" in MEASURED
    assert f"{ranking['emulator_explains']:.2f} of the variance" in told


def test_what_runs_side_by_side_gain() -> None:
    data = result("parallel_nights")
    assert f"(`{data['command'].removeprefix('uv run ').replace(' --seed 404', '')}`: " in MEASURED
    for row in data["rows"]:
        world, slots, gain, stderr, apart = (row[name] for name in ("world", "slots", "gain", "stderr", "apart"))
        told = f"{row['reported_too_high']:+.2f} | {100 * row['coverage']:.0f} % | {row['ideas']:.0f} |\n"
        assert f"| {world} | {slots} | {gain:.2f} | {stderr:.2f} | {apart:.2f} | {told}" in MEASURED
    assert len(data["rows"]) == 15


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
