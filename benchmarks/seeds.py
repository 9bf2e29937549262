"""What common random numbers are worth: is a change told better when both sides have the same seed?

    uv run benchmarks/slope.py --environment arithmetic --output slope.jsonl \\
        --settings default,lr*1.5,batch128,group8 --seeds 0-9
    uv run benchmarks/seeds.py slope.jsonl --results results/seeds.json

Of every setting against `default`: the standard deviation of the difference of scores with the same seed, and with
different ones. A campaign gives every config the same seeds in the same order; where batch or group change, the k-th
prompt comes at another time.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path

import click
from machine import machine, table, write_result

Scores = Mapping[int, float]  # by seed


def worth(one: Scores, other: Scores) -> dict[str, float | int]:
    """Standard deviations of the difference, paired by seed and not, as fractions, over the seeds that both have.

    Not paired: sqrt of the mean square of all differences of unlike seeds around the mean difference. ValueError for
    fewer than three seeds.
    """
    seeds = sorted(one.keys() & other.keys())
    if len(seeds) < 3:
        raise ValueError(f"{len(seeds)} seeds in common are too few. Run slope.py with --seeds 0-9")
    paired = [one[seed] - other[seed] for seed in seeds]
    mean = statistics.fmean(paired)
    unlike = [(one[a] - other[b] - mean) ** 2 for a in seeds for b in seeds if a != b]
    # The mean was taken from the same numbers: one degree of freedom of both sides is gone.
    apart = (statistics.fmean(unlike) * len(seeds) / (len(seeds) - 1)) ** 0.5
    return {"seeds": len(seeds), "same": statistics.stdev(paired), "different": apart}


@click.command(help=__doc__)
@click.argument("rows", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--results", type=click.Path(path_type=Path), help="Also write them as JSON.")
def main(rows: Path, results: Path | None) -> None:
    """Read, print, write."""
    scores: dict[str, dict[int, float]] = {}
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        if row.get("eval_score") is not None and row["setting"] != "base":
            scores.setdefault(row["setting"], {})[row["seed"]] = row["eval_score"]
    default = scores.pop("default")
    found = {name: worth(of, default) for name, of in scores.items()}
    click.echo(
        table(
            [{"setting": name} | row for name, row in found.items()],
            {"setting": "<24", "seeds": ">6", "same": ">10.4f", "different": ">10.4f"},
        )
    )
    if results:
        write_result(results, f"uv run benchmarks/seeds.py {rows.name}", found, machine())


if __name__ == "__main__":
    main()
