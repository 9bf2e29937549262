"""The memory of a campaign: what it has tried, by the keys that it touched."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from nightshift.campaign.campaign import Campaign, fold
from nightshift.campaign.commits import incumbent_config
from nightshift.campaign.counts import last_campaign
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Change, Effect, Record, Verdict
from nightshift.config.allowlist import KEYS, variants
from nightshift.config.train_toml import Config, changes_of, parse, spelled
from nightshift.config.values import Kind, value_text
from nightshift.errors import UsageError
from nightshift.files import Document

MANY_TRIALS = 3  # of one key by itself, all clearly worse: a dead end
ABSENT = "-"  # shown where a key did not apply

_Rest = frozenset[tuple[str, str | None]]  # what a trial's config sets besides the key, without a rider


@dataclass(frozen=True, slots=True)
class Trial:
    """What one experiment did to one key; `before` is the incumbent's value of that time."""

    number: int
    before: str  # as train.toml spells it; ABSENT where the key did not apply
    after: str
    verdict: Verdict
    effect: Effect | None  # of the change as it is believed now; None if no run measured it
    others: tuple[str, ...]  # keys of the same change
    since: str = ""  # what became of it: see Campaign.since
    starts: str = ""  # which start of its config it is, if not the first

    def __str__(self) -> str:
        words = [
            " ".join(filter(None, (self.verdict, self.since))),
            str(self.effect or ""),
            f"(with {', '.join(self.others)})" if self.others else "",
            f"[{self.starts}]" if self.starts else "",
        ]
        return f"{self.number:04d}  {self.before} -> {self.after}  {' '.join(filter(None, words))}"

    @property
    def is_rejected(self) -> bool:
        """True if the incumbent does not hold the change: discarded, reverted or crashed."""
        return self.since in ("", "reverted")

    @property
    def is_near_miss(self) -> bool:
        """True if the change was rejected, but its effect is within one standard deviation of 0, or above."""
        return self.is_rejected and self._best >= 0

    @property
    def is_clearly_worse(self) -> bool:
        """True if the change was rejected, and its effect is more than one standard deviation below 0. A crash is."""
        return self.is_rejected and self._best < 0

    @property
    def _best(self) -> float:
        return float("-inf") if self.effect is None else self.effect.mean + self.effect.sd


@dataclass(frozen=True, slots=True)
class Span:
    """The values between two rejected ones, with all other keys equal: covered. `around`: a kept value between them;
    what is left to gain lies near it."""

    low: float
    high: float
    around: float | None = None

    def __str__(self) -> str:
        text = f"{value_text(self.low)} .. {value_text(self.high)}"
        return text if self.around is None else f"{text} (around {value_text(self.around)})"


@dataclass(frozen=True, slots=True)
class KeyHistory:
    """Everything tried with one key, in order of the experiments."""

    key: str
    now: str  # the incumbent's value, as train.toml spells it
    trials: tuple[Trial, ...]
    covered: tuple[Span, ...]

    @property
    def near_misses(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.is_near_miss)

    @property
    def is_dead_end(self) -> bool:
        """Clearly worse whenever it was changed by itself: in every choice, to both sides, or MANY_TRIALS times."""
        alone = [trial for trial in self.trials if not trial.others]
        if not alone or any(not trial.is_clearly_worse for trial in self.trials):
            return False
        choices = _choices(self.key)
        tried = {trial.after for trial in alone} | {self.now}
        is_bracketed = any(span.around is not None for span in self.covered)
        return is_bracketed or len(alone) >= MANY_TRIALS or (bool(choices) and choices <= tried)


def load_configs(ledger: Ledger, records: Sequence[Record]) -> dict[int, Config]:
    """The submitted configs by experiment number; those that are gone or refused by today's allow-list are left out."""
    found, parse_once = {}, cache(parse)  # what is repeated with other seeds
    for record in records:
        with suppress(UsageError):
            found[record.number] = parse_once(ledger.source(record.number))
    return found


def history(campaign: Campaign, configs_by_number: Mapping[int, Config]) -> list[KeyHistory]:
    """The decided experiments of one campaign that had a new change, grouped by key: the most tried first."""
    trials: dict[str, list[tuple[Trial, _Rest]]] = {}
    for record in campaign.decided:
        candidate = configs_by_number.get(record.number)
        if candidate is None or record.judgement is None or record.run.new is None:
            continue
        values = {key: text for change in (*record.run.kept, record.run.new) for key, text in change.keys.items()}
        # What merely stopped to apply, because a variant changed, was not touched.
        touched = {change.key: change for change in changes_of(record.diff) if change.key in candidate.resolved}
        for key, change in touched.items():
            trial = Trial(
                number=record.number,
                before=change.old or ABSENT,
                after=change.new or ABSENT,
                verdict=Verdict(record.status),
                effect=campaign.effect(record),
                others=tuple(other for other in touched if other != key),
                since=campaign.since(record),
                starts=record.starts,
            )
            rest = frozenset(item for item in values.items() if item[0] != key)
            trials.setdefault(key, []).append((trial, rest))
    now = incumbent(campaign, configs_by_number)
    histories = []
    for key, pairs in sorted(trials.items(), key=lambda item: (-len(item[1]), item[0])):
        value = spelled(now.resolved[key]) if now and key in now.resolved else ABSENT
        of_key = tuple(trial for trial, _ in pairs)
        histories.append(KeyHistory(key, value, of_key, tuple(dict.fromkeys(_spans(pairs)))))
    return histories


def incumbent(campaign: Campaign, configs_by_number: Mapping[int, Config]) -> Config | None:
    """The baseline with the kept changes; None before the baseline, or where its file is gone."""
    baseline = configs_by_number.get(campaign.baseline.number) if campaign.baseline else None
    return incumbent_config(baseline, campaign.kept) if baseline else None


def kept_changes(campaign: Campaign) -> list[str]:
    """The kept changes, the most certain first, a line each: keys, effect, P(it helps), confirmed or unconfirmed."""
    if campaign.posterior is None:
        return []
    effect = campaign.posterior.effect
    return [
        f"{describe_change(campaign, change)}, {'confirmed' if campaign.is_confirmed(change) else 'unconfirmed'}"
        for change in sorted(campaign.kept, key=lambda change: -effect(change).p_helps)
    ]


def describe_change(campaign: Campaign, change: Change) -> str:
    """A change that was measured: its name and keys, its effect and P(it helps)."""
    assert campaign.posterior is not None
    return f"{change.name}  {change.settings}  {campaign.posterior.effect(change).with_p}"


def untried(histories: Sequence[KeyHistory], now: Config, used_keys: AbstractSet[str] | None) -> list[str]:
    """Open keys that the engine uses (None: all), that apply under the config `now`, and that nobody has touched."""
    touched = {each.key for each in histories}
    paths = dict.fromkeys(key.path for key in KEYS if key.path in now.resolved)
    return [path for path in paths if path not in touched and (used_keys is None or path in used_keys)]


def describe(histories: Sequence[KeyHistory], untried_keys: Sequence[str]) -> list[str]:
    """The memory in lines, the most useful first: what sums it up, then each key with its trials."""
    known = {
        "near misses": [f"{each.key} = {t.after} ({t.effect})" for each in histories for t in each.near_misses],
        "dead ends": [each.key for each in histories if each.is_dead_end],
        "covered": [f"{each.key} {span}" for each in histories for span in each.covered],
        "untried keys": untried_keys,
    }
    lines = [f"{title}: {', '.join(items)}" for title, items in known.items() if items]
    for each in histories:
        lines += [f"{each.key}, now {each.now}:", *(f"  {trial}" for trial in each.trials)]
    return lines


class Memory(Document, frozen=True, kw_only=True, tag="history"):
    """What the last campaign tried: `nightshift history`. `kept`: the incumbent's changes, the most certain first;
    `near_misses`: experiments; `damaged`: what could not be read."""

    branch: str
    rules_hash: str
    kept: tuple[str, ...]
    near_misses: tuple[int, ...]
    dead_ends: tuple[str, ...]
    keys: tuple[KeyHistory, ...]
    untried_keys: tuple[str, ...]
    damaged: tuple[str, ...]

    def __str__(self) -> str:
        lines = ["kept, the most certain first:", *(f"  {line}" for line in self.kept)] if self.kept else []
        lines += describe(self.keys, self.untried_keys)
        return "\n".join([*(f"damaged: {cause}" for cause in self.damaged), *lines])


def of_last_campaign(ledger: Ledger) -> Memory:
    """That of the last experiment; untried are keys of train.toml alone, as its engine is not asked which it uses.
    Raises UsageError before the baseline, and where the incumbent's file is gone.
    """
    records, damaged = ledger.readable()
    campaign = fold(ledger, records, *last_campaign(records))
    found = load_configs(ledger, campaign.decided)
    if campaign.baseline is None:
        raise UsageError("no experiment was decided here yet", "Start one: uv run run.py.")
    found.setdefault(campaign.baseline.number, ledger.stored_config(campaign.baseline))  # or it says what became of it
    now = incumbent(campaign, found)
    assert now is not None
    used_keys = set(now.values) - {key for record in campaign.decided for key in record.unused_keys}
    keys = history(campaign, found)
    return Memory(
        branch=campaign.baseline.branch,
        rules_hash=campaign.baseline.rules_hash,
        kept=tuple(kept_changes(campaign)),
        near_misses=tuple(sorted({trial.number for each in keys for trial in each.near_misses})),
        dead_ends=tuple(each.key for each in keys if each.is_dead_end),
        keys=tuple(keys),
        untried_keys=tuple(untried(keys, now, used_keys)),
        damaged=tuple(damaged),
    )


def _spans(trials: Sequence[tuple[Trial, _Rest]]) -> Iterator[Span]:
    """From rejected to rejected number, for every set of other keys; apart where a kept number lies between."""
    is_kept_by_value: dict[_Rest, dict[float, bool]] = {}
    for trial, rest in trials:
        values = is_kept_by_value.setdefault(rest, {})
        outcomes = [(trial.after, not trial.is_rejected)]
        outcomes += [] if trial.others else [(trial.before, True)]  # the incumbent of that time had the rest, too
        for text, is_kept in outcomes:
            with suppress(ValueError):
                values[float(text)] = values.get(float(text), False) or is_kept
    for values in is_kept_by_value.values():
        last = around = None
        for is_kept, group in groupby(sorted(values), key=values.__getitem__):
            neighbours = list(group)
            if is_kept:
                around = neighbours[-1]
                continue
            if last is not None:
                yield Span(last, neighbours[0], around)
            if len(neighbours) > 1:
                yield Span(neighbours[0], neighbours[-1])
            last = neighbours[-1]


def _choices(key: str) -> set[str]:
    """All spellings of a key with few of them; empty for numbers and lists."""
    [entry, *_] = variants(key)
    return {Kind.BOOL: {"true", "false"}, Kind.TABLE: {"on", "None"}, Kind.CHOICE: set(entry.choices)}.get(
        entry.kind, set()
    )
