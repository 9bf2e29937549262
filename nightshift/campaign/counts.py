"""How many experiments came to what: counted one way, wherever it is told."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from nightshift.records import Failure, Record, Verdict


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
    def of(cls, records: Iterable[Record], taken_back: Collection[int] = ()) -> Counts:
        """`taken_back`: numbers of the keeps that the incumbent does not stand on (any more)."""
        records = list(records)
        kept = [r.number for r in records if r.is_keep and r.parent is not None]
        crashes = [r.failure for r in records if r.status == Verdict.CRASH]
        discarded = sum(r.status == Verdict.DISCARD for r in records)
        baseline = sum(r.is_keep for r in records) - len(kept)
        return cls(
            num_experiments=len(records),
            baseline=baseline,
            kept=len(kept),
            taken_back=len({*kept} & {*taken_back}),
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
