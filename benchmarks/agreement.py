"""How much of an evaluation's noise two runs have in common: the correlation of their answers, example by example.

    uv run benchmarks/agreement.py                              of the two nights of recorded_runs.json
    uv run run.py && uv run run.py --again && uv run benchmarks/agreement.py .     of this checkout, on any engine

Prints the median over pairs of runs of the same settings, with different seeds, and over pairs of the better half of
the configs, and writes results/agreement.json. The second is `agreement` in [tool.nightshift.decision] of an
environment's pyproject.toml; what simulated nights assume is SAME_CONFIG and OTHER_CONFIG of simulated_nights.py.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import numpy as np
import recorded
from machine import RESULTS, machine, write_result
from simulated_nights import Floats

from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Record
from nightshift.campaign.scores import run_scores


def agreement(pairs: Iterable[tuple[Floats, Floats]]) -> dict[str, float | int | None]:
    """Of pairs of runs, (examples) both: median correlation and how many pairs; None where there is none."""
    found = [float(np.corrcoef(pair)[0, 1]) for pair in pairs if all(run.std() > 0 for run in pair)]
    return {"median": statistics.median(found) if found else None, "pairs": len(found)}


def agreements(records: Sequence[Record]) -> dict[str, dict[str, float | int | None]]:
    """Within settings, and between the better half of them."""
    runs: dict[str, list[Floats]] = {}
    for record in records:
        if record.evaluation:
            runs.setdefault(record.effective_hash, []).append(run_scores(record))
    means = {key: float(np.mean(rows)) for key, rows in runs.items()}
    better = sorted(runs, key=lambda key: -means[key])[: (len(runs) + 1) // 2]
    return {
        "same settings": agreement(pair for rows in runs.values() for pair in itertools.combinations(rows, 2)),
        "other settings": agreement((runs[a][0], runs[b][0]) for a, b in itertools.combinations(better, 2)),
    }


@click.command(help=__doc__)
@click.argument("checkouts", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "agreement.json")
def main(checkouts: tuple[Path, ...], output: Path) -> None:
    """Read, print, write."""
    nights: dict[str, Sequence[Record]] = {night: recorded.records(night) for night in recorded.NIGHTS}
    if checkouts:
        nights = {folder.resolve().name: Ledger(folder).readable()[0] for folder in checkouts}
    found = {}
    for night, all_records in nights.items():
        records = [record for record in all_records if record.evaluation]
        for key in dict.fromkeys((record.rules_name, record.rules_hash) for record in records):
            name = f"{night} {key[0]} {key[1]}"
            found[name] = agreements([r for r in records if (r.rules_name, r.rules_hash) == key])
            for what, one in found[name].items():
                told = "no pair" if one["median"] is None else f"{one['median']:.2f} ({one['pairs']} pairs)"
                click.echo(f"{name:40} {what:15} {told}")
    command = " ".join(["uv run benchmarks/agreement.py", *map(str, checkouts)])
    write_result(output, command, found, machine())


if __name__ == "__main__":
    main()
