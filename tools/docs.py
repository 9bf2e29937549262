"""Write what the documents quote: tables and figures from benchmarks/results, constants of the code, JSON Schemas.

    uv run tools/docs.py

In README.md, program.md and docs/*.md the text between `<!--NAME-->` and `<!--/-->` is replaced by the result of
MAKERS[NAME] below. No line may begin with the marker of a figure: Markdown would read the line as HTML.
docs/schemas/KIND.json are the JSON Schemas of record.json and of `nightshift status --json`.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from nightshift.campaign.records import Record
from nightshift.cli.status import Status
from nightshift.config.allowlist import find_key, number_text
from nightshift.config.rules import GSM8K_PRIOR_SD, RuleConstants
from nightshift.config.train_toml import load
from nightshift.engines.prime_rl.config import AC, OFFLOAD, SHARE, preset
from nightshift.engines.trl.engine import AT_ONCE
from nightshift.experiment.prove import STEPS
from nightshift.files import Document

ROOT = Path(__file__).parents[1]
RULES = RuleConstants()
SHIPPED = "kept-set"  # the name of the shipped rule in the result files
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SCHEMAS: tuple[type[Document], ...] = (Record, Status)
_MARKED = re.compile(r"<!--([a-z0-9-]+)-->(.*?)<!--/-->", re.DOTALL)


def result(name: str) -> Any:
    """Return the content of a file of benchmarks/results."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def worlds(name: str, rule: str = SHIPPED) -> dict[str, dict[str, Any]]:
    """Return the rows of one rule in a file of simulated nights, by the name of the world."""
    return {row["world"]: row for row in result(name)["worlds"] if row["rule"] == rule}


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table. `head` separates the columns by ` | `."""
    lines = [head, "|".join("---" for _ in head.split(" | ")), *(" | ".join(row) for row in rows)]
    return "\n".join(["", *(f"|{line}|" if line.startswith("---") else f"| {line} |" for line in lines), ""])


def listed(values: Iterable[float]) -> str:
    """Return numbers as `1, 2 and 3`."""
    *most, last = (f"{value:g}" for value in values)
    return f"{', '.join(most)} and {last}"


def with_error(value: float, stderr: float, places: int = 2) -> str:
    return f"{value:.{places}f} ± {stderr:.{places}f}"


def percent_points(fraction: float) -> str:
    """Return a fraction of 1 as a number of percentage points."""
    return f"{100 * fraction:g}"


def normal(mean: float, sd: float) -> str:
    """Return N(mean, sd) in percentage points."""
    return f"N({percent_points(mean)}, {percent_points(sd)})"


COMPARED_WORLDS = (
    "default", "hard", "bad changes", "half help", "nothing helps", "noise x2", "drift +3", "drawn 1", "drawn 4",
    "drawn 5", "drawn 6", "arithmetic",
)  # fmt: skip


def compared() -> str:
    rows, old = worlds("decision_rules_compared"), worlds("decision_rules_0.2.0", "0.2.0")
    others = [worlds("decision_rules_compared", rule) for rule in ("best", "bar")]
    names = [name for name in rows if name in COMPARED_WORLDS]
    return table(
        "world | this rule | 0.2.0 | best | bar | coverage | keeps / reverts | kept | harmful",
        (
            (
                name,
                f"**{rows[name]['gain']:.2f}** ± {rows[name]['stderr']:.2f}",
                *(f"{other[name]['gain']:.2f}" for other in (old, *others)),
                f"{old[name]['holds']:.0f} → {rows[name]['holds']:.0f} %",
                f"{rows[name]['commits_in']:.0f} / {rows[name]['commits_out']:.0f}",
                f"{rows[name]['changes']:.0f}",
                f"{rows[name]['harmful']:.0f} %",
            )
            for name in names
        ),
    )


def simulated() -> str:
    return table(
        "world | gain | coverage | bias | half-width | keeps / reverts | kept | harmful | missed",
        (
            (
                name,
                with_error(row["gain"], row["stderr"]),
                f"{with_error(row['holds'], row['holds_stderr'], 1)} %",
                f"{row['told_too_high']:+.2f}",
                f"{row['half_interval']:.1f}",
                f"{row['commits_in']:.1f} / {row['commits_out']:.1f}",
                f"{row['changes']:.1f}",
                f"{row['harmful']:.0f} %",
                "" if row["missed"] is None else f"{row['missed']:.0f} %",
            )
            for name, row in worlds("decision_rules_compared").items()
        ),
    )


def answers() -> str:
    pairs = zip(
        result("decision_rules_answers")["worlds"], result("decision_rules_answers_ahead")["worlds"], strict=True
    )
    return table(
        "world | answer | after the run | ahead | runs | coverage",
        (
            (
                after["world"],
                f"{after['answer_seconds']:.0f} s",
                *(with_error(row["gain"], row["stderr"]) for row in (after, ahead)),
                f"{after['runs']:.0f}, {ahead['runs']:.0f}",
                f"{after['holds']:.0f}, {ahead['holds']:.0f} %",
            )
            for after, ahead in pairs
        ),
    )


def power() -> str:
    """Return how often a simulated certificate finds a gain, by its number of runs."""
    rows = result("certificates")["power"]
    gains = list(dict.fromkeys(row["gain"] for row in rows))
    shares = {(row["runs"], row["gain"]): f"{100 * row['better']:.0f} %" for row in rows}
    head = " | ".join(("`--seeds`", *(f"true gain +{percent_points(gain)} pp" for gain in gains)))
    numbers = dict.fromkeys(row["runs"] for row in rows)
    return table(head, ((str(runs), *(shares[runs, gain] for gain in gains)) for runs in numbers))


def answers_compared() -> str:
    rows = result("decision_rules_answers_compared")["worlds"]
    cells = {(row["world"], row["answer_seconds"], row["rule"]): with_error(row["gain"], row["stderr"]) for row in rows}
    pairs = dict.fromkeys((row["world"], row["answer_seconds"]) for row in rows)
    return table(
        "world | answer | this rule | keep-above-best | moving bar",
        (
            (world, f"{seconds:.0f} s", *(cells[world, seconds, rule] for rule in (SHIPPED, "best", "bar")))
            for world, seconds in pairs
        ),
    )


def slots() -> str:
    names = {1: "decision_rules_compared", 4: "decision_rules_4_slots", 8: "decision_rules_8_slots"}
    old = {(row["slots"], row["world"]): row for row in result("parallel_nights_0.2.0")["rows"]}
    rows = [(num, world, worlds(name)[world]) for num, name in names.items() for world in ("default", "hard")]
    return table(
        "slots | world | this rule | 0.2.0 | coverage | keeps / reverts | kept",
        (
            (
                str(num),
                world,
                with_error(row["gain"], row["stderr"]),
                with_error(old[num, world]["gain"], old[num, world]["stderr"]),
                f"{with_error(row['holds'], row['holds_stderr'], 0)} %",
                f"{row['commits_in']:.0f} / {row['commits_out']:.0f}",
                f"{row['changes']:.0f}",
            )
            for num, world, row in rows
        ),
    )


SHIPPED_BOUNDS = "in 0.6 out 0.5"  # when decision_rules_4_slots.json was written; the others are its names of rules
OTHER_BOUNDS = ("in 0.6 out 0.4", "in 0.65 out 0.5", "in 0.65 out 0.4", "in 0.7 out 0.5", "in 0.7 out 0.4")


def bounds() -> str:
    """Return the gain of the shipped pair of bounds at four slots, and the difference of each other pair from it."""
    shown, rows = ("default", "hard", "bad changes", "nothing helps", "drawn 6"), []
    for rule in (SHIPPED, *OTHER_BOUNDS):
        nights = worlds("decision_rules_4_slots", rule)
        is_shipped = rule == SHIPPED
        most = [row for name, row in nights.items() if name != "arithmetic"]
        leads = [row["minus_kept_set"] or 0.0 for row in most]
        errors = [row["minus_stderr"] or 0.0 for row in most]
        stderr = math.sqrt(sum(error**2 for error in errors)) / len(most)
        rows.append(
            (
                (SHIPPED_BOUNDS if is_shipped else rule).replace("in", "keep at").replace("out", "revert below"),
                *(f"{nights[w]['gain']:.2f}" if is_shipped else f"{nights[w]['minus_kept_set']:+.2f}" for w in shown),
                f"{statistics.mean(leads):+.2f} ± {stderr:.2f}",
                f"{nights['default']['commits_in'] + nights['default']['commits_out']:.0f}",
                f"{statistics.mean(row['harmful'] for row in most):.1f} %",
                f"{min(row['holds'] for row in most):.0f} to {max(row['holds'] for row in most):.0f} %",
            )
        )
    return table(f"bounds | {' | '.join(shown)} | mean of 15 | commits | harmful | coverage", rows)


def proposers() -> str:
    def lead(row: Mapping[str, Any], name: str) -> str:
        return "" if row[name] is None else f"{row[name]:+.2f} ± {row[f'{name}_stderr']:.2f}"

    return table(
        "proposer | re-tests | gain | gain by re-tests | lead over random | coverage | keeps / reverts | kept",
        (
            (
                row["proposer"],
                "yes" if row["rider"] else "no",
                with_error(row["gain"], row["gain_stderr"]),
                lead(row, "by_rider"),
                lead(row, "lead"),
                f"{with_error(row['holds'], row['holds_stderr'], 0)} %",
                f"{row['commits_in']:.1f} / {row['commits_out']:.1f}",
                f"{row['changes']:.1f}",
            )
            for row in result("proposers")["summary"]
        ),
    )


SETTINGS = {
    "default": "as shipped",
    "lr*3": "learning rate x3",
    "lr*6+max_rl": "learning rate x6, max_rl",
    "lr/3": "learning rate /3",
    "group16": "group_size 16 instead of 4",
    "temp0.7": "temperature 0.7 instead of 1.0",
}


def arithmetic() -> str:
    rows = result("arithmetic_slope")["settings"]
    return table(
        "train.toml | score | sd | steps",
        (
            (label, f"{rows[name]['mean']:.3f}", f"{rows[name]['sd']:.3f}", f"{rows[name]['steps']:.0f}")
            for name, label in SETTINGS.items()
        ),
    )


def figures() -> str:
    gain, best, bar = (worlds("decision_rules_compared", rule)["default"]["gain"] for rule in (SHIPPED, "best", "bar"))
    aa, cases = result("aa"), result("certificates")["rows"]
    low, high = (100 * bound for bound in aa["interval_95"])
    mistakes = [100 * row["better_within"][-1] for row in cases]
    covered = [100 * row["covered"] for row in cases]
    nights = {row["name"]: recorded(row) for row in result("recorded_nights")["nights"]}
    old, plain = (row for row in result("trainer_steps")["summary"] if row["trainer"] != "here")
    time = result("where_the_time_goes")
    start, evaluation = (time["seconds"][name] for name in ("start-up of the trainer", "evaluation"))
    rows = {
        ("true gain of a simulated night of 9 hours", "decision_rules"): (
            f"{gain:.2f} pp; keep-above-best {best:.2f} pp, moving bar {bar:.2f} pp"
        ),
        (
            f"A/A test: {aa['decisions']} runs of the unchanged train.toml, each judged as a change without effect",
            "aa",
        ): (
            f"{aa['kept']} kept at once, {100 * aa['kept_share']:.0f} % "
            f"(95 % interval {low:.0f} to {high:.0f} %; simulated campaigns: {100 * aa['predicted_share']:.0f} %); "
            f"later runs kept {aa['adopted']} more and reverted {aa['reverted']}, so {aa['standing']} remain"
        ),
        ("certificates of two equal configs, 2,000 simulated campaigns in each of seven cases", "certificates"): (
            f'a false "better" within five uses of the test split in {min(mistakes):.1f} to {max(mistakes):.1f} % of '
            f"campaigns; coverage of the 95 % interval {min(covered):.1f} to {max(covered):.1f} %"
        ),
        (
            "nights of 30 experiments on 2 cores: test score of baseline and incumbent, retrained with 3 fresh seeds",
            "agents",
        ): f"TPE {nights['tpe-0']}; random search {nights['random-0']} (one night, a lucky draw)",
        ("steps per CPU second of the embedded trainer, in five alternating repetitions", "trainer_steps"): (
            f"{old['times_here']:.2f} times as many as 0.2.0 ({old['least']:.2f} to {old['most']:.2f}), "
            f"{plain['times_here']:.2f} times as many as trl.GRPOTrainer ({plain['least']:.2f} to {plain['most']:.2f})"
        ),
        ("share of an experiment that is training, with 60 s of training on 2 cores", "where_the_time_goes"): (
            f"{100 * time['shares']['training']:.0f} %; the start of the trainer takes {start:.1f} s, "
            f"the evaluation on 4,000 problems {evaluation:.1f} s"
        ),
    }
    return table(
        "what | figure | command: `uv run --group dev ...`",
        ((label, figure, f"`benchmarks/{program}.py`") for (label, program), figure in rows.items()),
    )


def recorded(night: Mapping[str, Any]) -> str:
    """Return the gain of a recorded night on fresh seeds."""
    low, high = (100 * bound for bound in night["95 % interval"])
    scores = f"{night['baseline, fresh seeds']:.3f} → {night['incumbent, fresh seeds']:.3f}"
    return f"{scores}, {100 * night['difference']:+.1f} pp (95 % interval {low:+.1f} to {high:+.1f})"


def replayed() -> str:
    """Return the gain of each recorded night under today's rule, and its certificate."""
    return "; ".join(
        f"{night['night']} {night['gain']:+.1f} ± {night['half_interval']:.1f} pp, certified {night['certified']:+.1f} "
        f"({' to '.join(f'{bound:+.1f}' for bound in night['certified_interval'])})"
        for night in result("replay")["nights"]
    )


def recorded_night() -> str:
    """Return the title and the certificate of docs/example-report.html."""
    page = (ROOT / "docs" / "example-report.html").read_text(encoding="utf-8")
    text = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    [title] = re.findall(r"<h1>(.+?)</h1>", page)
    [certificate, *_] = re.findall(r"Certified on .+? pp, 95 % interval .+? pp", text)
    return f"**{title}.** {certificate}."


def presets() -> str:
    def yes(value: object) -> str:
        return "no" if value is None else "yes"

    return table(
        "GB | two GPUs: `ac` | one GPU: `ac` | one GPU: Adam on | one GPU: share of the server | "
        "TRL: rollouts trained, sampled at once",
        (
            (
                str(size),
                yes(two[AC]),
                yes(one[AC]),
                "CPU" if one[OFFLOAD] else "GPU",
                f"{one[SHARE]}",
                ", ".join(map(str, AT_ONCE[size])),
            )
            for size in AT_ONCE
            for two, one in [(preset(f"2 x {size} GB"), preset(f"1 x {size} GB"))]
        ),
    )


def proof_rows() -> str:
    """Return the rows of `prepare.py --prove`, in its order."""
    return table(
        "row | measured by `uv run ...` | time | download | engine",
        (
            (name, f"`{step.command}`", step.time, step.download, " and ".join(step.engines))
            for name, step in STEPS.items()
        ),
    )


def kinds() -> str:
    names = ("ordinary", "bad", "bold", "disastrous")
    return ", ".join(
        f"{name} {normal(mean, sd)} ({100 * share:g} %)"
        for name, (mean, sd, share) in zip(names, RULES.kinds, strict=True)
    )


def gain_ratio() -> str:
    """Return the gain of the rule over the gain of keeping every new best score, in the default world."""
    ours, best = (worlds("decision_rules_compared", rule)["default"]["gain"] for rule in (SHIPPED, "best"))
    return f"{ours / best:.1f}"


# The keys that usually matter most, for program.md, and what an agent should know about each.
MAIN_KEYS = {
    "trainer.optim.lr": "the strongest lever in a short budget; too high a value collapses the policy",
    "trainer.scheduler.type": "a schedule that ends with the budget; linear and cosine need `max_steps`",
    "max_steps": "for a schedule: about the steps that fit into the budget (`num_steps` of a summary). Too low: "
    "training ends early; too high: the budget ends it before the schedule does",
    "orchestrator.batch_size": "rollouts per step: a smaller batch makes more, noisier steps",
    "orchestrator.group_size": "rollouts per prompt: a group whose rollouts all have the same reward teaches nothing, "
    "which is less likely in a larger group",
    "orchestrator.train.sampling.temperature": "variety of the rollouts",
    "orchestrator.train.sampling.max_completion_tokens": "longer completions are cut, and a cut answer often scores 0; "
    "a lower limit makes faster steps",
    "orchestrator.algo.type": "how rewards become advantages; `--keys` lists choices and length penalties",
    "trainer.loss.type": "the policy loss; `default` is the name of another loss, not the starting value; rules.toml "
    "may offer the user's own",
    "trainer.loss.ipo_threshold": "masks a token whose probability moved by more since sampling",
    "trainer.loss.kl_tau": "penalty on leaving the policy that sampled",
    "trainer.optim.type": "the optimizer",
    "trainer.optim.betas2": "Adam's decay of the second moment; a lower value adapts faster in a short run",
    "trainer.optim.max_norm": "gradients are clipped to this norm",
    "orchestrator.max_off_policy_steps": "rollouts that are more steps old are dropped",
}


def keys() -> str:
    """Return the main keys with the shipped values, and with ranges and engines of the allow-list."""
    config = load(ROOT / "train.toml")
    rows = []
    for path, note in MAIN_KEYS.items():
        key, value = find_key(path), config.get(path)
        assert key is not None
        shown = number_text(value) if isinstance(value, float) else config.shown(path)
        rows.append((f"`{path}`", str(shown), key.allowed().replace(" | ", ", "), " and ".join(key.engines), note))
    return table("key | starts at | allowed | engine | what it does", rows)


MAKERS: dict[str, Callable[[], str]] = {
    "compared": compared,
    "simulated": simulated,
    "answers": answers,
    "answers-compared": answers_compared,
    "power": power,
    "slots": slots,
    "bounds": bounds,
    "proposers": proposers,
    "arithmetic": arithmetic,
    "figures": figures,
    "replayed": replayed,
    "recorded-night": recorded_night,
    "presets": presets,
    "proof-rows": proof_rows,
    "gain-ratio": gain_ratio,
    "keys": keys,
    "kinds": kinds,
    "noises": lambda: listed(factor for factor, _ in RULES.noises),
    "noise-weights": lambda: f"{listed(100 * weight for _, weight in RULES.noises)} %",
    "seed-sd": lambda: percent_points(RULES.seed_sd),
    "prior-sd": lambda: percent_points(GSM8K_PRIOR_SD),
    "drift-sd": lambda: percent_points(RULES.drift_sd),
    "examples-share": lambda: f"{RULES.examples_share:g}",
    "accident": lambda: f"{normal(*RULES.accidents[1][:2])} pp, with probability {100 * RULES.accidents[1][2]:g} %",
    "in-out": lambda: f"A change is kept at P >= {RULES.keep_at:g}, and reverted at P < {RULES.revert_below:g}",
    "confirmed": lambda: f"{RULES.confirmed_above:g}",
    "least-worth": lambda: f"{100 * RULES.least_worth:.2f}",
    "shrink": lambda: f"{RULES.shrink[0]:g}",
    "shrink-more": lambda: "with N > {2:g} tested changes, {0:g} + {1:g} ln(N/{2:g}) standard deviations".format(
        *RULES.shrink
    ),
    "widen": lambda: "{:g}, at several slots by {:g}".format(*RULES.widen),
}


def schemas() -> dict[str, str]:
    """Return the text of each schema, JSON Schema 2020-12, by its kind."""
    texts = {}
    for document in _SCHEMAS:
        kind = str(document.__struct_config__.tag)
        schema = {"$schema": _DIALECT, "title": f"nightshift {kind}"} | msgspec.json.schema(document)
        texts[kind] = json.dumps(schema, indent=1, sort_keys=True) + "\n"
    return texts


def main() -> None:
    """Write the files. Exit code 1, and no file is written, if the names of markers and of makers differ."""
    pages = {
        path: path.read_text(encoding="utf-8")
        for path in (ROOT / "README.md", ROOT / "program.md", *(ROOT / "docs").glob("*.md"))
    }
    names = {match[1] for text in pages.values() for match in _MARKED.finditer(text)}
    if names != MAKERS.keys():
        sys.exit(f"these names are only in the documents or only in MAKERS: {sorted(names ^ MAKERS.keys())}")
    texts = {name: f"<!--{name}-->{make()}<!--/-->" for name, make in MAKERS.items()}
    for path, text in pages.items():
        path.write_text(_MARKED.sub(lambda match: texts[match[1]], text), encoding="utf-8")
    for kind, text in schemas().items():
        (ROOT / "docs" / "schemas" / f"{kind}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
