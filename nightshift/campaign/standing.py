"""What people and agents are told of the belief between two experiments; nothing is decided by it.

Of incumbent and baseline their scores, and of a keep what later runs say of it: it is provisional until one supports
it, and undecided where the odds are even.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import numpy as np

from nightshift.campaign.records import Failure, Record, Verdict
from nightshift.campaign.worlds import Array, Posterior
from nightshift.config.decision_rules import DecisionRules


@dataclass(frozen=True, slots=True)
class Counts:
    """Of experiments. The baseline is compared with nothing, so it is not one of the `kept`; of these some are
    `taken_back`. What a person, a kill or a reboot cut off is `interrupted`: no crash."""

    num_experiments: int = 0
    baseline: int = 0
    kept: int = 0
    taken_back: int = 0
    discarded: int = 0
    crashed: int = 0
    by_machinery: int = 0  # of the crashed: no fault of the config
    interrupted: int = 0
    undecided: int = 0  # in flight, or cut off and not closed yet

    @classmethod
    def of(cls, records: Iterable[Record], taken_back: Iterable[Record] = ()) -> Counts:
        """`taken_back`: the keeps that the incumbent does not stand on (any more)."""
        records = list(records)
        kept = [r.number for r in records if r.is_keep and r.parent is not None]
        crashes = [r.failure for r in records if r.status == Verdict.CRASH]
        discarded = sum(r.status == Verdict.DISCARD for r in records)
        baseline = sum(r.is_keep for r in records) - len(kept)
        return cls(
            num_experiments=len(records),
            baseline=baseline,
            kept=len(kept),
            taken_back=len({*kept} & {r.number for r in taken_back}),
            discarded=discarded,
            crashed=len(crashes) - crashes.count(Failure.INTERRUPTED),
            by_machinery=crashes.count(Failure.MACHINERY),
            interrupted=crashes.count(Failure.INTERRUPTED),
            undecided=len(records) - baseline - len(kept) - len(crashes) - discarded,
        )

    def __str__(self) -> str:
        """One line: `30 experiments: the baseline, 5 kept (1 taken back), 24 discarded, 0 crashed`."""
        parts = [
            "the baseline" if self.baseline else "",
            f"{self.kept} kept" + (f" ({self.taken_back} taken back)" if self.taken_back else ""),
            f"{self.discarded} discarded",
            f"{self.crashed} crashed" + (f" ({self.by_machinery} by machinery)" if self.by_machinery else ""),
            f"{self.interrupted} interrupted" if self.interrupted else "",
            f"{self.undecided} without a verdict" if self.undecided else "",
        ]
        whole = f"{self.num_experiments:,} experiment{'' if self.num_experiments == 1 else 's'}"
        return f"{whole}: {', '.join(filter(None, parts))}"


def num_since_keep(decided: Sequence[Record]) -> int:
    """Of decided experiments, in their order, how many came since the last keep; repeats try nothing."""
    tried = [r for r in decided if r.is_keep or r.status == Verdict.CRASH or (r.judgement and r.judgement.delta)]
    return next((i for i, r in enumerate(reversed(tried)) if r.is_keep), len(tried))


@dataclass(frozen=True, slots=True)
class Expected:
    """A difference of scores, a fraction: posterior mean and standard deviation."""

    mean: float
    stderr: float

    def __str__(self) -> str:
        """`+2.4 ± 4.9 pp`, the second half of its 95 % interval."""
        return f"{100 * self.mean:+.1f} ± {100 * Z95 * self.stderr:.1f} pp"


def effect_at_decision(record: Record) -> Expected | None:
    """Candidate less parent as its verdict had it; None for the baseline, a repeat, a crash."""
    judged = record.judgement
    if judged is None or judged.delta is None or judged.delta_stderr is None:
        return None
    return Expected(judged.delta, judged.delta_stderr)


Z95 = 1.959964  # half-width of a 95 % interval in standard deviations
DECIDED = 0.6  # with less the odds are nearly even
SURE = 0.9
_SMALL = 1e-12


@dataclass(frozen=True, slots=True)
class Standing:
    """What is believed of incumbent and baseline between two experiments.

    Scores are fractions 0..1, posterior means; the `_sd` are posterior standard deviations. The difference is
    what is reported of it (reported_gain). `run_sd` is that of one run's score around its config's true score:
    seeds and examples.
    """

    incumbent: float
    baseline: float
    incumbent_sd: float
    difference_sd: float
    run_sd: float

    @property
    def difference(self) -> float:
        """Incumbent minus baseline, both posterior means."""
        return self.incumbent - self.baseline

    @property
    def difference_interval(self) -> tuple[float, float]:
        """95 % of the difference."""
        half = Z95 * self.difference_sd
        return self.difference - half, self.difference + half


def reported_gain(belief: Posterior, rules: DecisionRules, num_experiments: int) -> tuple[Array, Array]:
    """What people are told of the incumbent's gain on the baseline after so many, see `shrinkage` and `many` of
    DecisionRules: mean and standard deviation, (...) both. No gain becomes a loss by that."""
    mean, sd = belief.difference(belief.incumbent, 0)
    (less, share), (usual, more) = rules.shrinkage, rules.many
    less += more * max(math.log(max(num_experiments, 1) / usual), 0.0)
    return np.maximum(mean - less * sd, np.minimum(mean, 0.0)), share * sd


def standing_of(belief: Posterior, rules: DecisionRules, num_experiments: int) -> Standing:
    """Of a campaign's belief after so many, under the constants of its incumbent."""
    gain, gain_sd = reported_gain(belief, rules, num_experiments)
    baseline = float(belief.expected[0])
    return Standing(
        incumbent=baseline + float(gain),
        baseline=baseline,
        incumbent_sd=float(belief.sd),
        difference_sd=float(gain_sd),
        run_sd=math.sqrt((belief.weights * belief.run_variance(rules)).sum()),
    )


class Support(StrEnum):
    """Of a change that was kept, and that the incumbent stands on."""

    UNDECIDED = "undecided"
    PROVISIONAL = "provisional"
    SUPPORTED = "supported"

    @classmethod
    def of(cls, p_better: float, p_at_verdict: float) -> Support:
        """Undecided where the odds are nearly even; supported where later runs left them at what they were."""
        if p_better < DECIDED:
            return cls.UNDECIDED
        return cls.SUPPORTED if p_better >= min(p_at_verdict, SURE) else cls.PROVISIONAL


def supports(
    belief: Posterior, kept: Sequence[Record], lineage: Sequence[Record], decided: Sequence[Record]
) -> dict[int, Support]:
    """By number, of every keep of the lineage but the baseline; `kept` in the order of the belief's configs.

    Each run of a keep, or of what was made from it, tells something of it: after one it is judged by what is believed
    now of the difference to what it was made from, against what its verdict said of that.
    """
    told = _ancestors_of_runs(kept, decided)
    places = {record.number: place for place, record in enumerate(kept)}
    found = {}
    for record in lineage[1:]:
        judged, parent = record.judgement, places.get(record.parent or 0)
        if judged is None or judged.p_better is None or judged.delta is None or judged.delta_stderr is None:
            continue
        if record.number in told and parent is not None:
            delta, sd = belief.difference(places[record.number], parent)
            scale = record.decision_rules.calibration
            then = _chance(judged.delta, judged.delta_stderr, scale)
            found[record.number] = Support.of(_chance(float(delta), float(sd), scale), then)
        else:
            found[record.number] = fresh(judged.p_better)
    return found


def fresh(p_better: float) -> Support:
    """Of a keep that no later run told anything of."""
    return Support.UNDECIDED if p_better < DECIDED else Support.PROVISIONAL


def _chance(delta: float, sd: float, calibration: float) -> float:
    """That a difference is above 0, as p_better is drawn towards a half."""
    return NormalDist(0, max(sd, _SMALL)).cdf(calibration * delta)


def _ancestors_of_runs(kept: Sequence[Record], decided: Sequence[Record]) -> set[int]:
    """Keeps whose ideas a later run was made from; of one that does not tell, its parent and what that stands on."""
    parents = {record.number: record.parent for record in kept}
    found: set[int] = set()
    for record in decided:
        if record.status == Verdict.CRASH:
            continue
        found.update(record.proposal.base or ())
        parent = record.parent if record.proposal.base is None else None
        while parent is not None and parent not in found:
            found.add(parent)
            parent = parents.get(parent)
    return found
