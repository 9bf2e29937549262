"""Agents against each other: nights of equal length from the same baseline, each measured afresh on the test split.

\b
    uv run --group dev benchmarks/agents.py --folder FOLDER --agents claude,search,tpe,random --nights 3 --hours 8

An agent is whatever `nightshift night --agent` takes; one whose command has a comma in it is given by itself: --agent.
For each night a throw-away clone, then `nightshift certify`: baseline and incumbent trained afresh with new seeds and
evaluated on the test split. Nights take turns, so that a machine that changes is nobody's luck. Prints a table, and
writes it with every night's curve to --output. Resumable: give the same command, with more nights or agents too.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import numpy as np
from machine import RESULTS, machine, table, write_result
from scipy.stats import t

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nightshift.campaign.campaign import Campaign  # noqa: E402
from nightshift.campaign.ledger import Ledger  # noqa: E402
from nightshift.campaign.records import CERTIFY_NAME, PLAN_NAME, Comparison  # noqa: E402
from nightshift.campaign.results import last_campaign  # noqa: E402
from nightshift.night import state  # noqa: E402
from tests.checkouts import clone  # noqa: E402

COMMAND = "uv run --group dev benchmarks/agents.py --folder FOLDER --agents"


def slug(agent: str) -> str:
    """Return the name of an agent's clones: its own if that is one word."""
    words = re.sub(r"[^a-z0-9]+", "-", agent.lower()).strip("-")[:30]
    return words if words == agent else f"{words}-{hashlib.sha256(agent.encode()).hexdigest()[:6]}"


def nightshift(folder: Path, *arguments: str) -> int:
    program = Path(sys.executable).with_name("nightshift")
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.run([program, *arguments], cwd=folder, stdout=log, stderr=log, check=False).returncode


def campaign_of(folder: Path) -> Campaign:
    ledger = Ledger(folder)
    return Campaign.of(ledger.records(), *last_campaign(ledger.records()))


def certificate_of(folder: Path) -> Comparison | None:
    comparisons = Ledger(folder).comparisons()
    return next((comparison for comparison in reversed(comparisons) if comparison.plan.split == "test"), None)


def measure(folder: Path, agent: str, seed: int, flags: Sequence[str], budget: Sequence[str], seeds: int) -> None:
    """One night and its certificate, `budget` being a flag of both; what is done already is left as it is."""
    if not folder.exists():
        clone(folder, f"autoresearch/{folder.name}")
    done = folder.parent / f"{folder.name}.done"  # of one that --hours ended the records do not tell
    if not done.exists():
        click.echo(f"{folder.name}: the night", err=True)
        if nightshift(folder, "night", "--agent", agent, "--seed", str(seed), *flags, *budget) != 0:
            sys.exit(f"the night failed: see {folder}.log")
        done.touch()
    campaign = campaign_of(folder)
    if campaign.kept and certificate_of(folder) is None:
        click.echo(f"{folder.name}: {seeds} fresh seeds each of baseline and incumbent", err=True)
        is_begun = (folder / "runs" / CERTIFY_NAME / "0001" / PLAN_NAME).exists()
        if nightshift(folder, "certify", *(("--resume", "0001") if is_begun else ("--seeds", str(seeds)))) != 0:
            sys.exit(f"the certificate failed: see {folder}.log")


def night(folder: Path, agent: str) -> dict[str, Any]:
    """What one night came to. `kept`: changes of the incumbent at its end; `curve`: the believed gain after each
    decided experiment, pp. The certified gain of a night that keeps nothing is 0: it has one config only."""
    campaign, certificate = campaign_of(folder), certificate_of(folder)
    decided = state.decided(Ledger(folder).records())
    standings = [record.judgement.standing for record in decided if record.judgement]
    return {
        "agent": agent,
        "night": folder.name,
        "experiments": len(decided),
        "kept": len(campaign.kept),
        "crashed": sum(r.status == "crash" for r in decided),
        "minutes": round(sum(r.total_seconds or 0.0 for r in decided) / 60, 1),
        "believed_pp": 100 * campaign.standing.gain if campaign.standing else None,
        "gain_pp": 0.0 if not campaign.kept else 100 * certificate.estimate.difference if certificate else None,
        "interval_pp": [100 * end for end in certificate.estimate.interval] if certificate and campaign.kept else None,
        "curve": [100 * standing.gain for standing in standings if standing],
    }


def mean_and_band(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and the ends of its 95 % interval over nights (Student's t); the ends are nan of one night."""
    if len(values) < 2:
        return fmean(values), float("nan"), float("nan")
    half = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return fmean(values), fmean(values) - half, fmean(values) + half


def summary(nights: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row an agent, the best first: certified gain, mean over its nights."""
    rows = []
    for agent in dict.fromkeys(each["agent"] for each in nights):
        own = [each for each in nights if each["agent"] == agent]
        gains = [each["gain_pp"] for each in own if each["gain_pp"] is not None]
        gain, low, high = mean_and_band(gains) if gains else (float("nan"),) * 3
        rows.append(
            {
                "agent": agent[:24],
                "nights": len(own),
                "experiments": fmean(each["experiments"] for each in own),
                "kept": fmean(each["kept"] for each in own),
                **{k: None if np.isnan(v) else v for k, v in (("gain_pp", gain), ("low", low), ("high", high))},
                "believed_pp": fmean(each["believed_pp"] or 0.0 for each in own),
            }
        )
    return sorted(rows, key=lambda row: float("inf") if row["gain_pp"] is None else -row["gain_pp"])


@click.command(help=__doc__)
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Where the clones live, or will.")
@click.option("--agents", default="search,tpe,random", show_default=True, help="Names, with commas between.")
@click.option("--agent", "more", multiple=True, help="One more, by itself: any command.")
@click.option("--nights", "num_nights", default=3, show_default=True, help="Of each agent; its seeds are 0, 1, ...")
@click.option("--experiments", type=click.IntRange(min=2), help="Length of a night, the baseline included.")
@click.option("--hours", type=float, help="Length of a night, where agents think for different times.")
@click.option("--seeds", default=3, show_default=True, help="Fresh runs of baseline and of incumbent.")
@click.option("--engine", help="As of a night.")
@click.option("--pairs", help="As of a night.")
@click.option("--budget-seconds", type=float, help="Another training budget than the default one: a rehearsal.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "agents.json", show_default=True)
def main(folder: Path, agents: str, more: tuple[str, ...], num_nights: int, seeds: int, **given: Any) -> None:
    """Drive, measure, print."""
    length = [f for name in ("experiments", "hours") if given[name] for f in (f"--{name}", str(given[name]))]
    if not length:
        raise click.UsageError("how long is a night? Give --experiments or --hours.")
    flags = length + [f for name in ("engine", "pairs") if given[name] for f in (f"--{name}", given[name])]
    budget = [] if given["budget_seconds"] is None else ["--budget-seconds", str(given["budget_seconds"])]
    kind, rows = machine(), list[dict[str, Any]]()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [*filter(None, agents.split(",")), *more]
    for seed in range(num_nights):
        for agent in wanted:
            place = folder.resolve() / f"{slug(agent)}-{seed}"
            measure(place, agent, seed, flags, budget, seeds)
            rows.append(night(place, agent))
    output: Path = given["output"]
    command = " ".join([COMMAND, ",".join(wanted), *flags, *budget])
    found = summary(rows)
    write_result(output, command, {"summary": found, "nights": rows}, kind)
    columns = {"agent": "<25", "nights": ">7", "experiments": ">12.1f", "kept": ">6.1f", "gain_pp": ">+9.2f"}
    columns |= {"low": ">+7.2f", "high": ">+7.2f", "believed_pp": ">+13.2f"}
    click.echo(table(found, columns))
    click.echo(output)


if __name__ == "__main__":
    main()
