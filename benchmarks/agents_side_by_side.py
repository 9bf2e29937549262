"""TPE against random search: the same number of experiments from the same baseline, then measured afresh.

    uv run benchmarks/agents_side_by_side.py --folder FOLDER --experiments 20 --seeds 3

For each agent a throw-away clone, a night (`nightshift night --agent ...`) on the default set-up, and then
`nightshift certify`: baseline and incumbent trained afresh with new seeds and evaluated on the sealed set. The
ledgers go, without weights, curves and completions, to benchmarks/campaigns/<name>/, the table to
benchmarks/results/agents_side_by_side.json. Resumable: give the same command.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from machine import RESULTS, machine, write_result

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nightshift.campaign.index import fold, last_campaign  # noqa: E402
from nightshift.campaign.ledger import Ledger  # noqa: E402
from nightshift.certify import certificate  # noqa: E402
from nightshift.night import state as night_state  # noqa: E402
from nightshift.night.text import SUMMARY_NAME  # noqa: E402
from nightshift.records import Record  # noqa: E402
from tests.checkouts import clone  # noqa: E402

CAMPAIGNS = ROOT / "benchmarks" / "campaigns"
# What replay, history and the page need; curves are megabytes.
STORED = (SUMMARY_NAME, certificate.CERTIFICATE_NAME, "[0-9]*/record.json", "[0-9]*/train.toml")


def nightshift(folder: Path, *arguments: str) -> int:
    program = Path(sys.executable).with_name("nightshift")
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.run([program, *arguments], cwd=folder, stdout=log, stderr=log, check=False).returncode


def measure(folder: Path, agent: str, seed: int, experiments: int, fresh_seeds: int, budget: Sequence[str]) -> None:
    """One night and its certificate; what is done already is left as it is."""
    if not folder.exists():
        clone(folder, f"autoresearch/{folder.name}")
    ledger = Ledger(folder)
    if len(night_state.decided(ledger.records())) < experiments:
        print(f"{folder.name}: the night", flush=True)
        flags = ("--agent", agent, "--seed", str(seed), "--experiments", str(experiments))
        if nightshift(folder, "night", "--engine", "trl", *flags, *budget) != 0:
            sys.exit(f"the night failed: see {folder}.log")
    has_keep = any(r.status == "keep" and r.parent is not None for r in ledger.records())
    if has_keep and certificate.read(ledger.runs_dir) is None:
        print(f"{folder.name}: {fresh_seeds} fresh seeds each of baseline and incumbent", flush=True)
        if nightshift(folder, "certify", "--seeds", str(fresh_seeds), *budget) != 0:
            sys.exit(f"the certificate failed: see {folder}.log")


def store(folder: Path) -> None:
    """Records, train.toml, summary and certificate to benchmarks/campaigns/."""
    runs_dir, target = Ledger(folder).runs_dir, CAMPAIGNS / folder.name
    shutil.rmtree(target, ignore_errors=True)
    for path in (path for pattern in STORED for path in runs_dir.glob(pattern)):
        copy = target / path.relative_to(runs_dir)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def row(folder: Path) -> dict[str, object]:
    """What one night came to."""
    ledger = Ledger(folder)
    records = ledger.records()
    decided: list[Record] = night_state.decided(records)
    standing = fold(ledger, records, *last_campaign(records)).standing
    sealed = certificate.read(Ledger(folder).runs_dir)
    seconds = sum(r.total_seconds or 0.0 for r in records)
    return {
        "name": folder.name,
        "experiments": len(decided),
        "kept": sum(r.status == "keep" and r.parent is not None for r in decided),
        "crashed": sum(r.status == "crash" for r in decided),
        "minutes": round(seconds / 60, 1),
        "best raw score": max(r.score for r in decided if r.score is not None),
        "expected score": round(standing.incumbent, 4) if standing else None,
        "baseline, fresh seeds": round(sealed.baseline_score, 4) if sealed else None,
        "incumbent, fresh seeds": round(sealed.incumbent_score, 4) if sealed else None,
        "difference": round(sealed.difference, 4) if sealed else None,
        "95 % interval": [round(bound, 4) for bound in sealed.interval] if sealed else None,
    }


@click.command(help=__doc__)
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Where the clones live, or will.")
@click.option("--experiments", default=20, show_default=True, help="Of each night, the baseline included.")
@click.option("--seeds", "fresh_seeds", default=3, show_default=True, help="Fresh runs of baseline and of incumbent.")
@click.option("--agent", "agents", multiple=True, default=("tpe", "random"), show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the agents.")
@click.option("--budget-seconds", type=float, help="Another training budget than the default one: a rehearsal.")
def main(
    folder: Path, experiments: int, fresh_seeds: int, agents: tuple[str, ...], seed: int, budget_seconds: float | None
) -> None:
    """Drive, measure, store, print."""
    kind = machine()
    folder.mkdir(parents=True, exist_ok=True)
    budget = () if budget_seconds is None else ("--budget-seconds", str(budget_seconds))
    rows = []
    for agent in agents:
        place = folder.resolve() / f"{agent}-{seed}"
        measure(place, agent, seed, experiments, fresh_seeds, budget)
        if budget_seconds is None:
            store(place)
        rows.append(row(place))
    if budget_seconds is None:
        command = f"uv run benchmarks/agents_side_by_side.py --folder FOLDER --experiments {experiments} --seed {seed}"
        write_result(RESULTS / "agents_side_by_side.json", command, {"nights": rows}, kind)
    for name in rows[0]:
        print(f"{name:24}" + "".join(f"{json.dumps(each[name]):>24}" for each in rows))


if __name__ == "__main__":
    main()
