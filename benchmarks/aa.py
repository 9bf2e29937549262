"""A/A: the same config against itself. How often is it kept, and how often should it be?

\b
    uv run benchmarks/aa.py --folder FOLDER                                      60 decisions as shipped, 70 minutes
    uv run benchmarks/aa.py --folder FOLDER --decisions 20 --budget-seconds 6

Runs run.py in a throw-away clone on a campaign branch: one baseline, then `--again` with new seeds. Equal settings are
booked as runs of the incumbent, and never kept; so each run is decided here once more as if its settings had another
hash, as a change has that does nothing (tests/integration/test_harmless_change.py shows one: the same weights).
Then simulates as many decisions with nightshift/campaign/decision.py, from the run-to-run spread and the per-example
agreement that the real runs showed, and prints both. Resumable: give the same --folder.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import click
import numpy as np
from machine import RESULTS, machine, write_result
from msgspec import structs
from posterior_interval import Campaigns
from simulated_nights import Floats

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arithmetic import ARITHMETIC_TRL  # noqa: E402
from replay import replay  # noqa: E402

from nightshift.campaign.ledger import Ledger  # noqa: E402
from nightshift.campaign.records import Record  # noqa: E402
from nightshift.campaign.scores import BUSY, taken  # noqa: E402
from nightshift.config.decision_rules import DecisionRules  # noqa: E402
from tests.checkouts import clone  # noqa: E402

BRANCH = "autoresearch/aa"


def real_decisions(folder: Path, num_decisions: int, budget_seconds: float) -> list[Record]:
    """A baseline and `num_decisions` repetitions of it; goes on where an earlier call stopped."""
    if not folder.exists():
        clone(folder, BRANCH)
    ledger = Ledger(folder)
    while True:
        records = [r for r in ledger.records() if r.status in ("keep", "discard")]
        print(f"{max(len(records) - 1, 0)} of {num_decisions} decisions", file=sys.stderr, flush=True)
        if len(records) > num_decisions:
            return records
        arguments = ["run.py", "--engine", "trl", "--budget-seconds", str(budget_seconds), "-m", "A/A", "--again"]
        result = subprocess.run([sys.executable, *arguments], cwd=folder, stdout=subprocess.DEVNULL, check=False)
        if result.returncode != 0:
            sys.exit(f"run.py ended with {result.returncode}")


def decided_anew(recorded: Sequence[Record]) -> list[Record]:
    """The same runs, each decided as if its settings were new: an idea that does nothing."""
    changed = [
        structs.replace(record, effective_hash=str(record.number), proposal=structs.replace(record.proposal, base=None))
        for record in recorded
    ]
    return list(replay(changed, {}).decided)


def simulate(matrix: Floats, rules: DecisionRules, num_decisions: int, repetitions: int) -> Floats:
    """Kept share of simulated A/A campaigns, when runs are drawn like the rows of `matrix` (runs x examples, 0/1).

    A campaign is what was really run: one baseline, then `num_decisions` in a row, each informing the next.

    An example's answer is a threshold on a latent sum of its difficulty (shared by all runs), a run
    effect with the observed spread, and noise of its own; difficulty's share comes from the observed
    agreement between runs.
    """
    rng = np.random.default_rng(0)
    normal = NormalDist()
    n = matrix.shape[1]
    mean = matrix.mean()
    cut = normal.inv_cdf(1 - mean)
    pairs = np.corrcoef(matrix)[np.triu_indices(len(matrix), 1)].mean()
    # Tetrachoric correlation of two 0/1 variables with this margin, by bisection on simulated normals.
    draws = rng.standard_normal((3, 200_000))
    low, high = 0.0, 0.999
    for _ in range(25):
        share = (low + high) / 2
        a, b = (math.sqrt(share) * draws[0] + math.sqrt(1 - share) * draws[i] > cut for i in (1, 2))
        low, high = (share, high) if np.corrcoef(a, b)[0, 1] < pairs else (low, share)
    # Run effect: what the spread of run scores holds beyond the sampling of examples with fixed difficulty.
    within = float(np.mean(matrix.mean(axis=0) * (1 - matrix.mean(axis=0)))) * len(matrix) / (len(matrix) - 1) / n
    run_sd = math.sqrt(max(matrix.mean(axis=1).var(ddof=1) - within, 0.0))
    shift = run_sd / normal.pdf(cut)  # score sd -> latent sd

    difficulty = rng.standard_normal((repetitions, n))

    def run() -> Floats:
        latent = math.sqrt(share) * difficulty + math.sqrt(1 - share) * rng.standard_normal(difficulty.shape)
        return (latent + shift * rng.standard_normal((repetitions, 1)) > cut).astype(float)

    campaigns = Campaigns(run(), rules)
    kept = np.sum([campaigns.test(run()) for _ in range(num_decisions)], axis=0)
    print(
        f"observed: {len(matrix)} runs, mean {mean:.4f}, run sd {matrix.mean(axis=1).std(ddof=1):.4f}, "
        f"correlation between runs {pairs:.2f}"
    )
    return kept / num_decisions


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927)."""
    p, denominator = successes / trials, 1 + z**2 / trials
    centre = (p + z**2 / (2 * trials)) / denominator
    half = z * math.sqrt(p * (1 - p) / trials + z**2 / (4 * trials**2)) / denominator
    return centre - half, centre + half


@click.command(help=__doc__)
@click.option("--decisions", default=60, show_default=True)
@click.option("--budget-seconds", default=60.0, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Where the clone lives, or will.")
@click.option("--repetitions", default=2000, show_default=True, help="Simulated campaigns.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "aa.json")
def main(decisions: int, budget_seconds: float, folder: Path, repetitions: int, output: Path) -> None:
    """Run, simulate, print, write."""
    kind = machine()
    recorded = real_decisions(folder, decisions, budget_seconds)
    records = decided_anew(recorded)
    kept = sum(r.status == "keep" for r in records[1:])
    low, high = wilson(kept, len(records) - 1)
    rows = [record.evaluation.example_scores for record in records if record.evaluation]
    shares = simulate(np.array(rows), ARITHMETIC_TRL.decision, len(records) - 1, repetitions)
    predicted = float(shares.mean())
    p_better = [r.judgement.p_better for r in records[1:] if r.judgement and r.judgement.p_better is not None]
    result = {
        "decisions": len(records) - 1,
        "kept": kept,
        "kept_as_equal_settings": sum(record.status == "keep" for record in recorded[1:]),
        "kept_share": kept / (len(records) - 1),
        "interval_95": [low, high],
        "predicted_share": predicted,
        "predicted_middle_95": np.quantile(shares, [0.025, 0.975]).tolist(),
        "predicted_inside": low <= predicted <= high,
        "busy_runs": sum(taken(record) >= BUSY for record in recorded),
        "taken_back": sum(bool(r.judgement and r.judgement.taken_back_to) for r in records),
        "run_scores": [round(float(np.mean(row)), 4) for row in rows],
        "p_better_quartiles": np.quantile(p_better, [0.0, 0.25, 0.5, 0.75, 1.0]).round(3).tolist(),
        "p_better": [round(p, 4) for p in p_better],
    }
    print(json.dumps(result, indent=1))
    command = f"uv run benchmarks/aa.py --folder FOLDER --decisions {decisions} --budget-seconds {budget_seconds:g}"
    write_result(output, command, result, kind)


if __name__ == "__main__":
    main()
