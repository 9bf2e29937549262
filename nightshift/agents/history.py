"""The results of a campaign: its runs, and the scores by key and value. For the brief, logs/ and the user."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import fmean

import msgspec
from msgspec import structs

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import incumbent_config
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Z95, Change, Effect, Record, Verdict
from nightshift.campaign.results import Row, last_campaign
from nightshift.config.allowlist import ANY, KEYS, PARAMETERS
from nightshift.config.train_toml import Config, parse, spelled
from nightshift.errors import Failure, UsageError
from nightshift.files import Document
from nightshift.text import clean

KEPT_TITLE = """\
The incumbent is the baseline with these kept changes, the most certain first (effect now ± half of its 95 % interval; \
P(it helps) is rounded down; confirmed: it is above 95 %; unconfirmed: any other kept change):"""
RUNS_TITLE = """\
All runs (difference: measured score minus the score predicted without the new change, ± half of the 95 % interval; \
compare runs by it, and state what a change adds by its effect):
run | score | difference | training steps | verdict: change"""
KEYS_TITLE = """\
Scores by key and value. Counted are the runs whose only new change set the value, and the runs with the value and no \
new change. A score is as measured, with the changes that the incumbent contained then, also those reverted later. \
Difference: to the baseline's value of the key (of all keys in the row), adjusted for the other changes of the counted \
runs:
value | runs counted | mean score of these runs | difference"""


class RunRow(Row, frozen=True, kw_only=True):
    """A decided experiment. `difference`: measured score minus the score that the posterior expected, before this run,
    of the same config without the new change, as a fraction of 1. None: not measured."""

    difference: float | None
    difference_halfwidth: float | None  # half of the 95 % interval: error of the expectation, and noise of one run
    starts: str  # such as "start 2 of this config"; "" for the first

    def __str__(self) -> str:
        why = f" ({clean(self.why, 160)})" if self.verdict == "crash" else ""
        rider = f" (also re-testing {self.rider})" if self.rider else ""
        return (
            f"{self.number:04d} | {_percent(self.eval_score)} | {_points(self.difference, self.difference_halfwidth)}"
            f" | {'' if self.num_steps is None else self.num_steps} | {self.status}{why}: "
            f"{', '.join(self.changes or ('the baseline', *self.kept))}{rider}"
        )


class ValueRow(msgspec.Struct, frozen=True):
    """The counted runs with one value of a key (see KEYS_TITLE).

    `difference`: mean partial residual of the key, that is the measured score minus the score that the posterior of
    all runs estimates for the same config with the baseline's values of the keys of this change. So values that were
    measured on different incumbents have one scale. A run that re-tests the value is not counted: only this run
    measured the effect of its other new change.
    """

    value: str  # as train.toml spells it, or UNSET
    others: tuple[str, ...]  # the other keys of the same change: the difference is the effect of all of them
    numbers: tuple[int, ...]  # of the experiments
    num_crashes: int
    mean_score: float | None
    difference: float | None  # 0 by definition for the baseline's value
    difference_halfwidth: float | None  # half of the 95 % interval: noise of the runs, and error of the estimate

    def __str__(self) -> str:
        name = f"{self.value} (with {', '.join(self.others)})" if self.others else self.value
        crashed = f" (and {self.num_crashes} crashed)" if self.num_crashes else ""
        difference = _points(self.difference, self.difference_halfwidth)
        if difference and self.others:
            difference += " by all these keys together"
        return f"{name} | {len(self.numbers)}{crashed} | {_percent(self.mean_score)} | {difference}"


class KeyHistory(msgspec.Struct, frozen=True):
    """One key. `values` are sorted; changes of several keys come last."""

    key: str
    baseline: str  # the baseline's value, or UNSET
    now: str  # the incumbent's
    values: tuple[ValueRow, ...]

    @property
    def lines(self) -> list[str]:
        """One line with the best value of the key, then one line per value."""
        # Values that were changed without other keys; the baseline's value is one of them.
        alone = [row for row in self.values if row.difference is not None and not row.others]
        best = f"best by difference {max(alone, key=lambda row: row.difference or 0.0).value}"
        best = best if len(alone) > 1 else "no other value was measured alone"
        title = f"{self.key}: baseline {self.baseline}, incumbent {self.now}, {best}"
        return [title, *(f"  {row}" for row in self.values)]


class Memory(Document, frozen=True, kw_only=True, tag="history"):
    """The results of one campaign. `kept`: the incumbent's changes, the most certain first. `runs`: in the order of
    their decisions. `keys`: the latest changed key first. `damaged`: the causes why files could not be read."""

    branch: str
    rules_hash: str
    kept: tuple[str, ...]
    runs: tuple[RunRow, ...]
    keys: tuple[KeyHistory, ...]
    untried_keys: tuple[str, ...]
    damaged: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"damaged: {cause}" for cause in self.damaged]
        lines += [KEPT_TITLE, *(f"  {line}" for line in self.kept), ""] if self.kept else []
        lines += [RUNS_TITLE, *map(str, self.runs), ""]
        lines += [KEYS_TITLE, *(line for key in self.keys for line in key.lines), ""] if self.keys else []
        return "\n".join([*lines, f"untried keys: {'; '.join(self.untried_keys)} (all keys: uv run run.py --keys)"])


def load_configs(ledger: Ledger, records: Sequence[Record]) -> dict[int, Config]:
    """Return the submitted configs by experiment number. Missing and invalid configs are left out."""
    configs = {}
    for record in records:
        with suppress(UsageError):
            configs[record.number] = parse(ledger.source(record.number))
    return configs


def history(campaign: Campaign, configs: Mapping[int, Config], now: Config, used_keys: Collection[str]) -> Memory:
    """Return the results of the decided experiments. `now`: the incumbent's config. `used_keys`: the keys that the
    engine uses; only these keys are listed as untried."""
    assert campaign.baseline is not None
    keys, runs = key_histories(campaign, configs, now), list[RunRow]()
    for record, row in zip(campaign.decided, campaign.rows(campaign.decided), strict=True):
        effect = campaign.differences.get(record.number)
        more = {"difference": effect and effect.mean, "difference_halfwidth": effect and Z95 * effect.sd}
        runs.append(RunRow(**structs.asdict(row) | more, starts=record.starts))
    tried = {key.key for key in keys}
    parameters = sorted(path for path in used_keys if path.startswith(f"{PARAMETERS}.") and ANY not in path)
    paths = [key.path for key in KEYS if key.path in now.resolved] + parameters
    return Memory(
        branch=campaign.baseline.branch,
        rules_hash=campaign.baseline.rules_hash,
        kept=tuple(kept_changes(campaign)),
        runs=tuple(runs),
        keys=tuple(keys),
        untried_keys=tuple(path for path in paths if path in used_keys and path not in tried),
    )


def key_histories(campaign: Campaign, configs: Mapping[int, Config], now: Config) -> list[KeyHistory]:
    """Return the keys that new changes touched, the latest first. A crash counts if the config caused it."""
    assert campaign.baseline is not None
    first = configs[campaign.baseline.number]
    records = [r for r in campaign.decided if r.number in configs and r.failure in (None, Failure.CONFIG)]
    histories = []
    touched = (key for record in reversed(records) for key in _touched(record.run.new, configs[record.number]))
    for key in dict.fromkeys(touched):
        groups: dict[tuple[str, tuple[str, ...]], list[Record]] = {(spelled(first.shown(key)), ()): []}
        for record in records:
            run, change, config = record.run, _setter(record, key), configs[record.number]
            if change is run.new if run.new else record.status != Verdict.CRASH:
                others = (k for k in _touched(change, config) if k != key and _setter(record, k) is change)
                groups.setdefault((spelled(config.shown(key)), tuple(others)), []).append(record)
        baseline, *rows = (_value_row(campaign, key, *name, group) for name, group in groups.items())
        rows.append(structs.replace(baseline, difference=0.0, difference_halfwidth=0.0))
        rows.sort(key=lambda row: (bool(row.others), *_order(row.value)))
        histories.append(KeyHistory(key, baseline.value, spelled(now.shown(key)), tuple(rows)))
    return histories


def _value_row(
    campaign: Campaign, key: str, value: str, others: tuple[str, ...], records: Sequence[Record]
) -> ValueRow:
    assert campaign.posterior is not None
    scores, residuals, variances = dict[int, float](), list[float](), list[float]()
    for record in records:
        if record.score is not None and record.status != Verdict.CRASH:
            rest = [change for change in record.run.changes if change is not _setter(record, key)]
            expected, sd = campaign.posterior.predict(rest, campaign.hours(record), (key, *others))
            scores[record.number] = record.score
            residuals.append(record.score - expected)
            variances.append(sd**2)
    num_crashes = len(records) - len(scores)
    if not scores:
        return ValueRow(value, others, (), num_crashes, None, None, None)
    halfwidth = Z95 * math.sqrt(fmean(variances) + campaign.posterior.noise_variance / len(scores))
    return ValueRow(value, others, tuple(scores), num_crashes, fmean(scores.values()), fmean(residuals), halfwidth)


def kept_changes(campaign: Campaign) -> list[str]:
    """Return one line per kept change, the most certain first: name, effect, P(it helps) and keys."""
    return [
        f"{c.name}  effect {effect.with_p}, {'' if campaign.is_confirmed(c) else 'un'}confirmed: {c.settings}"
        for c, effect in campaign.effects
    ]


def of_last_campaign(ledger: Ledger) -> Memory:
    """Return the results of the last experiment's campaign, for `nightshift history`. Only keys that train.toml sets
    count as untried. Raises UsageError if no experiment was decided, or the baseline's train.toml is gone."""
    records, damaged = ledger.readable()
    campaign = Campaign.read(ledger, records, *last_campaign(records))
    if campaign.baseline is None:
        raise UsageError("no experiment was decided here yet", "Start the first experiment: uv run run.py.")
    now = incumbent_config(ledger.stored_config(campaign.baseline), campaign.kept)
    used_keys = set(now.values) - {key for record in campaign.decided for key in record.unused_keys}
    memory = history(campaign, load_configs(ledger, campaign.decided), now, used_keys)
    return structs.replace(memory, damaged=(*damaged, *filter(None, [campaign.unread])))


def _setter(record: Record, key: str) -> Change | None:
    """Return the change that set a key in a run; None for the baseline's value."""
    return next((change for change in reversed(record.run.changes) if key in change.keys), None)


def _touched(change: Change | None, config: Config) -> Iterator[str]:
    """Yield the keys of a change that apply in a config."""
    yield from (key for key in (change.keys if change else ()) if key in config.resolved)


def _order(value: str) -> tuple[float, str]:
    """Sort numbers by size, and texts after them."""
    with suppress(ValueError):
        return float(value), ""
    return math.inf, value


def _percent(score: float | None) -> str:
    return "" if score is None else f"{100 * score:.1f} %"


def _points(difference: float | None, halfwidth: float | None) -> str:
    """Return a text such as `+2.4 ± 4.9 pp`; "" if not measured."""
    if difference is None or halfwidth is None:
        return ""
    return str(Effect(difference, halfwidth / Z95)) if halfwidth else "0 (the baseline's value)"
