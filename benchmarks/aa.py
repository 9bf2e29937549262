"""A/A: the same config against itself. How often is a change that does nothing kept, and how often should it be?

\b
    uv run benchmarks/aa.py                          decide the recorded runs of results/aa.json again
    uv run benchmarks/aa.py --folder FOLDER          60 new decisions, 70 minutes

With --folder, run.py runs in a throw-away clone on a campaign branch: one baseline, then `--again` with new seeds. Give
the same folder again to resume. Runs of equal settings have no change to decide about, so each run is decided here as
if it had one: a change that does nothing (tests/integration/test_trl_trainer.py shows one: the same weights). Then
the rule decides simulated runs whose scores have the mean and standard deviation of the real ones.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
import recorded
from machine import RESULTS, machine, write_result

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nightshift.campaign.ledger import Ledger  # noqa: E402
from nightshift.campaign.posterior import Posterior  # noqa: E402
from nightshift.campaign.records import Action, Change, Run  # noqa: E402
from nightshift.config.rules import RuleConstants  # noqa: E402
from tests.checkouts import clone  # noqa: E402

BRANCH = "autoresearch/aa"
NUM_EXAMPLES = 1000
HOURS = 75.0 / 3600  # of a run


def real_scores(folder: Path, num_decisions: int, budget_seconds: float) -> list[float]:
    """Return the scores of a baseline and of `num_decisions` repetitions. Resumes where an earlier call stopped."""
    if not folder.exists():
        clone(folder, BRANCH)
    ledger = Ledger(folder)
    while True:
        scores = [record.score for record in ledger.records() if record.score is not None]
        print(f"{max(len(scores) - 1, 0)} of {num_decisions} decisions", file=sys.stderr, flush=True)
        if len(scores) > num_decisions:
            return scores
        arguments = ["run.py", "--engine", "trl", "--budget-seconds", str(budget_seconds), "-m", "A/A", "--again"]
        result = subprocess.run([sys.executable, *arguments], cwd=folder, stdout=subprocess.DEVNULL, check=False)
        if result.returncode != 0:
            sys.exit(f"run.py ended with {result.returncode}")


def decide(scores: Sequence[float], rules: RuleConstants) -> dict[str, int]:
    """Decide every run after the first one as a change of the incumbent that does nothing. Return the numbers of
    changes that were kept at once, adopted later, reverted, and kept at the end."""
    first = scores[0]
    posterior = Posterior(first, math.sqrt(first * (1 - first) / NUM_EXAMPLES), rules)
    actions: list[Action] = []
    for number, score in enumerate(scores[1:], start=1):
        change = Change(experiment=number, keys={f"key_{number}": "1"})
        run = Run(kept=posterior.kept, new=change)
        actions += [decision.action for decision in posterior.observe(run, score, number * HOURS)]
    return {
        "kept": actions.count(Action.KEEP),
        "adopted": actions.count(Action.ADOPT),
        "reverted": actions.count(Action.REVERT),
        "standing": len(posterior.kept),
    }


def simulate(scores: Sequence[float], rules: RuleConstants, repetitions: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the share of changes that simulated campaigns keep at once, whose scores scatter as the real ones do."""
    rng = np.random.default_rng(0)
    num_decisions = len(scores) - 1
    runs = rng.normal(np.mean(scores), np.std(scores, ddof=1), (repetitions, len(scores)))
    return np.array([decide(list(campaign), rules)["kept"] / num_decisions for campaign in runs])


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson 1927)."""
    p, denominator = successes / trials, 1 + z**2 / trials
    centre = (p + z**2 / (2 * trials)) / denominator
    half = z * math.sqrt(p * (1 - p) / trials + z**2 / (4 * trials**2)) / denominator
    return centre - half, centre + half


@click.command(help=__doc__)
@click.option("--decisions", default=60, show_default=True)
@click.option("--budget-seconds", default=60.0, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where the clone is, or will be.")
@click.option("--repetitions", default=1000, show_default=True, help="Simulated campaigns.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "aa.json", show_default=True)
def main(decisions: int, budget_seconds: float, folder: Path | None, repetitions: int, output: Path) -> None:
    """Run or read the scores, decide, simulate, print and write."""
    kind = machine()
    command = "uv run benchmarks/aa.py"
    runs = {"date": datetime.now(UTC).date().isoformat(), "machine": kind}
    if folder is None:
        old = json.loads((RESULTS / "aa.json").read_text())
        scores, runs = old["run_scores"], old["runs"]
    else:
        command += f" --folder FOLDER --decisions {decisions} --budget-seconds {budget_seconds:g}"
        scores = real_scores(folder, decisions, budget_seconds)
    figures: dict[str, Any] = decide(scores, recorded.rules().decision)
    num_decisions = len(scores) - 1
    low, high = wilson(figures["kept"], num_decisions)
    shares = simulate(scores, recorded.rules().decision, repetitions)
    predicted = float(shares.mean())
    result = {
        "decisions": num_decisions,
        **figures,
        "kept_share": figures["kept"] / num_decisions,
        "interval_95": [low, high],
        "predicted_share": predicted,
        "predicted_middle_95": np.quantile(shares, [0.025, 0.975]).tolist(),
        "predicted_inside": low <= predicted <= high,
        "runs": runs,
        "run_scores": [round(score, 4) for score in scores],
    }
    print(json.dumps(result, indent=1))
    write_result(output, command, result, kind)


if __name__ == "__main__":
    main()
