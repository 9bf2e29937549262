"""How many experiments came to what, and what is believed: the same words and numbers wherever they are told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nightshift.campaign.records import Change, Decision, Failure, Record, Stage, Standing, Verdict


@dataclass(frozen=True, slots=True)
class Counts:
    """Of experiments. The baseline is compared with nothing, so it is not one of the `kept`; of these some are
    `reverted` by now, others `replaced` by changes of the same keys, and of the discarded some `adopted`. `measured`:
    ran without a new change. What a person, a kill or a reboot cut off is `interrupted`: no crash."""

    num_experiments: int = 0
    baseline: int = 0
    kept: int = 0
    reverted: int = 0
    replaced: int = 0
    discarded: int = 0
    adopted: int = 0
    measured: int = 0
    crashed: int = 0
    by_machinery: int = 0  # of the crashed: no fault of the config
    interrupted: int = 0
    undecided: int = 0  # in flight, or cut off and not closed yet

    @classmethod
    def of(cls, records: Iterable[Record], kept: Iterable[Change] = ()) -> Counts:
        records, kept = list(records), tuple(kept)
        numbers = {change.experiment for change in kept}
        keeps = [record.run.new for record in records if record.is_keep and record.run.new]
        left = {change.experiment: change for change in keeps if change.experiment not in numbers}
        num_replaced = sum(is_replaced(change, kept) for change in left.values())
        discards = [r.run.new.experiment for r in records if r.status == Verdict.DISCARD and r.run.new]
        crashes = [r.failure for r in records if r.status == Verdict.CRASH]
        baseline = sum(r.is_keep for r in records) - len(keeps)
        measured = sum(r.status == Verdict.MEASURED for r in records)
        return cls(
            num_experiments=len(records),
            baseline=baseline,
            kept=len(keeps),
            reverted=len(left) - num_replaced,
            replaced=num_replaced,
            discarded=len(discards),
            adopted=len({*discards} & numbers - {change.experiment for change in keeps}),
            measured=measured,
            crashed=len(crashes) - crashes.count(Failure.INTERRUPTED),
            by_machinery=crashes.count(Failure.MACHINERY),
            interrupted=crashes.count(Failure.INTERRUPTED),
            undecided=len(records) - baseline - len(keeps) - len(crashes) - len(discards) - measured,
        )

    def __str__(self) -> str:
        """One line: `30 experiments: the baseline, 5 kept (1 reverted), 20 discarded, 4 measured again, 0 crashed`."""
        outcomes = {"reverted": self.reverted, "replaced": self.replaced}
        left = [f"{number} {name}" for name, number in outcomes.items() if number]
        parts = [
            "the baseline" if self.baseline else "",
            f"{self.kept} kept" + (f" ({', '.join(left)})" if left else ""),
            f"{self.discarded} discarded" + (f" ({self.adopted} adopted later)" if self.adopted else ""),
            f"{self.measured} measured again" if self.measured else "",
            f"{self.crashed} crashed" + (f" ({self.by_machinery} by machinery)" if self.by_machinery else ""),
            f"{self.interrupted} interrupted" if self.interrupted else "",
            f"{self.undecided} without a verdict" if self.undecided else "",
        ]
        whole = f"{self.num_experiments:,} experiment{'' if self.num_experiments == 1 else 's'}"
        return f"{whole}: {', '.join(filter(None, parts))}"


def told_decisions(decisions: Iterable[Decision]) -> str:
    """Changes that came in or went out: `0003 reverted, 0005 adopted`."""
    return ", ".join(f"{decision.change.name} {decision.action.past}" for decision in decisions)


def is_replaced(change: Change, kept: Iterable[Change]) -> bool:
    """True if kept changes set all keys of a change that left, so that nothing of the change remains."""
    return change.keys.keys() <= {key for other in kept for key in other.keys}


def num_since_keep(decided: Sequence[Record]) -> int:
    """Of decided experiments, in their order, how many came since the last keep; runs without a new change try
    nothing."""
    tried = [record for record in decided if record.status != Verdict.MEASURED]
    return next((index for index, record in enumerate(reversed(tried)) if record.is_keep), len(tried))


def standing_text(standing: Standing, kept: Sequence[Change]) -> str:
    """`expected score 0.5120, baseline 0.4710: +4.1 ± 2.4 pp by 0003, 0007`."""
    text = f"expected score {standing.incumbent:.4f}, baseline {standing.baseline:.4f}"
    if not kept:
        return f"{text}: nothing is kept"
    names = ", ".join(change.name for change in kept)
    return f"{text}: {gain_text(standing)} by {names}"


def gain_text(standing: Standing) -> str:
    """The reported gain and half of its 95 % interval: `+4.1 ± 2.4 pp`."""
    return f"{100 * standing.gain:+.1f} ± {100 * standing.gain_halfwidth:.1f} pp"


def last_scores(records: Sequence[Record]) -> str:
    """The scores of a night's last runs side by side: `incumbent 51.2, 50.4 %; baseline 47.1, 47.9 %`."""
    parts = []
    for name, stage in (("incumbent", Stage.LAST_INCUMBENTS), ("baseline", Stage.LAST_BASELINES)):
        scores = [r.score for r in records if r.run.stage is stage and r.score is not None]
        if scores:
            parts.append(f"{name} {', '.join(f'{100 * score:.1f}' for score in scores)} %")
    return "; ".join(parts)


def last_campaign(records: Sequence[Record]) -> tuple[str, str]:
    """Branch and rules hash of the last experiment that came to a verdict; of no campaign where none did."""
    return next(((r.branch, r.rules_hash) for r in reversed(records) if r.judgement is not None), ("", ""))
