"""What rewards foretell of scores, fitted on recorded campaigns and judged on others.

    uv run --group dev benchmarks/early_stop.py --fit RUNS ... --judge RUNS ...     folders like runs/, with curves

Every run there was trained to its end, so what a stop would have lost is known. The fit goes into [tool.nightshift] of
the environment; benchmarks/proposers.py --early-stop plays nights with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from machine import RESULTS, machine, table, write_result
from replay import campaigns
from scipy.stats import binomtest

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.hopeless import comparable, least_reward, reference
from nightshift.campaign.ledger import Ledger
from nightshift.foretelling import Foretelling, Rung, window
from nightshift.records import Record
from nightshift.train_toml.config import Config, parse

SHARES = (0.25, 0.5)
PRICES = (0.02, 0.05, 0.1, 0.2, 0.4)  # of prior_sd
NUM_BOOTSTRAPS = 200
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Tried:
    """A run to its end, and all that was known when it began."""

    night: str
    campaign: Campaign
    record: Record
    parent: Record
    config: Config
    parent_config: Config

    @property
    def final(self) -> float:
        return (self.record.score or 0.0) - (self.parent.score or 0.0)

    def rung(self, foretelling: Foretelling) -> tuple[Rung, float] | None:
        """What a worker would compare at a share, and the reward there; None where rewards do not compare."""
        share, run = foretelling.share, self.record.runs[0]
        reward, other = window(run.curve, share), reference(self.parent, share)
        factor, warmup = comparable(self.config, self.parent_config), self.config.get("trainer.scheduler.warmup_steps")
        if reward is None or other is None or factor is None or (warmup or 0) > share / 2 * run.training.num_steps:
            return None
        return Rung(foretelling, other, 0.0, factor), reward

    def difference(self, share: float) -> float | None:
        """Of the rewards, as a forecast takes it."""
        found = self.rung(Foretelling(share, 1.0, 1.0))
        return None if found is None else found[0].forecast(found[1]).delta


def tried(folder: Path) -> Iterator[Tried]:
    """The runs of all campaigns of a ledger that have curves."""
    ledger = Ledger(ROOT, folder)
    for records in campaigns(ledger.records()):
        campaign = Campaign()
        for record in records:
            parent = next((kept for kept in campaign.kept if kept.number == record.parent), None)
            is_new = parent is not None and record.score is not None and not campaign.is_repeat(record)
            if parent is not None and is_new and any(point is not None for point in record.runs[0].curve):
                configs = parse(ledger.source(record.number)), parse(ledger.source(parent.number))
                yield Tried(folder.parent.name, campaign, record, parent, *configs)
            campaign = campaign.step(record)


def fitted(pairs: Sequence[tuple[float, float]], share: float) -> Foretelling:
    """From (difference of the rewards, final difference of the scores) of runs: how much of a final difference shows in
    the rewards, by least squares, and how far off it is when that is read the other way round."""
    rewards, finals = np.array(pairs).T
    growth = max(float((rewards @ finals) / (finals @ finals)), 0.02)
    return Foretelling(share, growth, float(min(np.sqrt(((rewards / growth - finals) ** 2).mean()), 1.0)))


def pairs_at(found: Sequence[Tried], share: float) -> list[tuple[float, float]]:
    """Differences of rewards with what came of them."""
    return [(d, one.final) for one in found if (d := one.difference(share)) is not None]


def judge(found: Sequence[Tried], foretellings: Sequence[Foretelling], price: float) -> dict[str, Any]:
    """Stops, and what they would have lost."""
    stopped = list[tuple[Tried, float]]()
    for one in found:
        for foretelling in foretellings:
            if (seen := one.rung(foretelling)) and seen[1] < least_reward(one.campaign, one.record, seen[0], price):
                stopped.append((one, foretelling.share))
                break
    finals = [one.final for one, _ in stopped]
    better = sum(final > 0 for final in finals)
    interval = binomtest(better, len(stopped)).proportion_ci() if stopped else None  # Clopper and Pearson 1934
    return {
        "price": price,
        "runs": len(found),
        "stopped": len(stopped),
        "quarter": sum(share == SHARES[0] for _, share in stopped),
        "better": better,
        "better_low": None if interval is None else float(interval.low),
        "better_high": None if interval is None else float(interval.high),
        "within_1_pp": sum(final > -0.01 for final in finals),
        "kept": sum(one.record.is_keep for one, _ in stopped),
        "lost_pp": 100 * float(np.mean(np.maximum(finals, 0))) if stopped else None,
        "saved": sum(1 - share for _, share in stopped) / max(len(found), 1),
        "all_better": sum(one.final > 0 for one in found),
    }


@click.command(help=__doc__)
@click.option("--fit", "to_fit", type=click.Path(path_type=Path, exists=True), multiple=True, required=True)
@click.option("--judge", "to_judge", type=click.Path(path_type=Path, exists=True), multiple=True, required=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "early_stop.json")
def main(to_fit: tuple[Path, ...], to_judge: tuple[Path, ...], output: Path) -> None:
    """Fit, judge, print, write."""
    kind, rng = machine(), np.random.default_rng(0)
    fitting, judged = ([one for folder in folders for one in tried(folder)] for folders in (to_fit, to_judge))
    foretellings, bootstraps, held_out = list[Foretelling](), list[list[dict[str, float]]](), list[dict[str, Any]]()
    for share in SHARES:
        pairs, others = np.array(pairs_at(fitting, share)), pairs_at(judged, share)
        foretelling = fitted(pairs, share)  # type: ignore[arg-type]
        draws = [fitted(pairs[rng.integers(0, len(pairs), len(pairs))], share) for _ in range(NUM_BOOTSTRAPS)]  # type: ignore[arg-type]
        errors = [final - foretelling.forecast(d)[0] for d, final in others]
        z = [(final - f) / v**0.5 for d, final in others for f, v in [foretelling.forecast(d)]]
        row = {"share": share, "fitted_to": len(pairs), "judged_on": len(others)}
        held_out.append(
            row | {"error_sd": float(np.std(errors)), "bias": float(np.mean(errors)), "z_sd": float(np.std(z))}
        )
        foretellings.append(foretelling)
        bootstraps.append([asdict(draw) for draw in draws])
    both = [(one, ds) for one in fitting if None not in (ds := [one.difference(share) for share in SHARES])]
    errors_of = [
        [one.final - f.forecast(d or 0.0)[0] for f, d in zip(foretellings, ds, strict=True)] for one, ds in both
    ]
    correlation = float(np.corrcoef(np.array(errors_of).T)[0, 1])
    rows = [judge(judged, foretellings, price) for price in PRICES]
    pairs_told = {
        name: [[one.night, one.record.number, *(one.difference(share) for share in SHARES), one.final] for one in found]
        for name, found in (("fit_pairs", fitting), ("judge_pairs", judged))
    }
    click.echo("\n".join(map(str, foretellings)))
    click.echo(
        table(
            held_out,
            {
                "share": ">5.2f",
                "fitted_to": ">10",
                "judged_on": ">10",
                "error_sd": ">9.4f",
                "bias": ">8.4f",
                "z_sd": ">6.2f",
            },
        )
    )
    columns = {"price": ">6.2f", "runs": ">6", "stopped": ">9", "quarter": ">9", "better": ">8", "within_1_pp": ">13"}
    columns |= {"kept": ">6", "lost_pp": ">9.2f", "saved": ">7.2f", "all_better": ">12"}
    click.echo(table(rows, columns))
    figures = {"foretellings": [asdict(one) for one in foretellings], "held_out": held_out, "rows": rows}
    figures |= {"error_correlation": correlation, "bootstraps": bootstraps, **pairs_told}
    write_result(output, "uv run --group dev benchmarks/early_stop.py", figures, kind)


if __name__ == "__main__":
    main()
