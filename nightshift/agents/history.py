"""The memory of ideas: what a campaign has tried, by the keys that it touched."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby
from typing import Any

from nightshift.campaign.campaign import Campaign, expected
from nightshift.campaign.index import fold_sound, last_campaign
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Record, Verdict
from nightshift.campaign.standing import Expected
from nightshift.config.allowlist import KEYS, variants
from nightshift.config.train_toml import Config, changed_keys, changes_of, parse, spelled
from nightshift.config.values import Kind, value_text
from nightshift.errors import UsageError
from nightshift.files import Document

MANY_TRIALS = 3  # of one key by itself, all clearly worse: a dead end
ABSENT = "-"  # shown where a key did not apply

_Rest = frozenset[tuple[str, str]]  # a config without one key, canonical


@dataclass(frozen=True, slots=True)
class Trial:
    """What one experiment did to one key; `before` is the incumbent's value of that time."""

    number: int
    before: str  # as train.toml spells it; ABSENT where the key did not apply
    after: str
    verdict: Verdict
    effect: Expected | None  # of candidate less parent as believed now; None for a crash
    others: tuple[str, ...]  # keys that changed with it, and ideas by which the incumbent was another
    since: str = ""  # what became of a keep: taken back, provisional, undecided, supported
    starts: str = ""  # which start of its config it is, if not the first

    def __str__(self) -> str:
        """One line."""
        words = [
            " ".join(filter(None, (self.verdict, self.since))),
            str(self.effect or ""),
            f"(with {', '.join(self.others)})" if self.others else "",
            f"[{self.starts}]" if self.starts else "",
        ]
        return f"{self.number:04d}  {self.before} -> {self.after}  {' '.join(filter(None, words))}"

    @property
    def is_near_miss(self) -> bool:
        """Discarded, but within one standard error of no difference, or above."""
        return self.verdict is Verdict.DISCARD and self._best >= 0

    @property
    def is_clearly_worse(self) -> bool:
        """Rejected, and more than one standard error below; a crash is."""
        return self.verdict is not Verdict.KEEP and self._best < 0

    @property
    def _best(self) -> float:
        return float("-inf") if self.effect is None else self.effect.mean + self.effect.stderr


@dataclass(frozen=True, slots=True)
class Span:
    """The values between two tried and rejected ones, all other keys equal: covered.

    `around` is the kept value between them, where there is one: what is left to gain lies near it.
    """

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
        """Trials worth another look, alone or with another key."""
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
    """The decided experiments of one campaign, grouped by key: the most tried first. One more run of its parent tried
    nothing, whatever keys its file has that the engine does not use."""
    records = [record for record in campaign.decided if record.is_keep or not campaign.is_repeat(record)]
    trials: dict[str, list[Trial]] = {}
    since = campaign.since
    for record in records:
        candidate = configs_by_number.get(record.number)
        parent = configs_by_number.get(record.parent) if record.parent is not None else None
        judgement = record.judgement
        if candidate is None or parent is None or judgement is None:
            continue
        # What merely stopped to apply, because a variant changed, was not touched.
        own = (
            changed_keys(parent, candidate)
            if record.proposal.base is None
            else [c.key for c in changes_of(record.diff)]
        )
        touched = [key for key in own if key in candidate.resolved]
        beside = campaign.beside(record)
        for key in touched:
            trial = Trial(
                number=record.number,
                before=_value_of(parent, key),
                after=_value_of(candidate, key),
                verdict=Verdict(record.status),
                effect=expected(campaign, record),
                others=(*(other for other in touched if other != key), *([beside] if beside else [])),
                since=since.get(record.number, ""),
                starts=record.starts,
            )
            trials.setdefault(key, []).append(trial)
    best = incumbent(campaign, configs_by_number)
    items = {n: frozenset((path, _value_of(c, path)) for path in c.resolved) for n, c in configs_by_number.items()}
    found = []
    for key, of_key in sorted(trials.items(), key=lambda item: (-len(item[1]), item[0])):
        covered = dict.fromkeys(_spans(key, records, configs_by_number, items))
        found.append(KeyHistory(key, _value_of(best, key) if best else ABSENT, tuple(of_key), tuple(covered)))
    return found


def incumbent(campaign: Campaign, configs_by_number: Mapping[int, Config]) -> Config | None:
    """The config that the campaign has arrived at; None before the baseline, or where its file is gone."""
    return configs_by_number.get(campaign.incumbent.number) if campaign.incumbent else None


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
    """What the last campaign tried: `nightshift history`. `near_misses`: experiments; `damaged`: what could not be read
    or fits nothing."""

    branch: str
    rules_hash: str
    near_misses: tuple[int, ...]
    dead_ends: tuple[str, ...]
    keys: tuple[KeyHistory, ...]
    untried_keys: tuple[str, ...]
    damaged: tuple[str, ...]

    def __str__(self) -> str:
        """In lines, see `describe`."""
        lines = describe(self.keys, self.untried_keys)
        return "\n".join([*(f"damaged: {cause}" for cause in self.damaged), *lines])


def of_last_campaign(ledger: Ledger) -> Memory:
    """That of the last experiment; untried are keys of train.toml alone, as its engine is not asked which it uses.
    Raises UsageError before the baseline, and where the incumbent's file is gone.
    """
    records, damaged = ledger.readable()
    campaign, unfit = fold_sound(ledger, records, *last_campaign(records))
    found = load_configs(ledger, campaign.decided)
    if campaign.incumbent is None:
        raise UsageError("no experiment was decided here yet", "Start one: uv run run.py.")
    now = incumbent(campaign, found) or ledger.stored_config(campaign.incumbent)  # which says what became of it
    used_keys = set(now.values) - {key for record in campaign.decided for key in record.unused_keys}
    keys = history(campaign, found)
    return Memory(
        branch=campaign.incumbent.branch,
        rules_hash=campaign.incumbent.rules_hash,
        near_misses=tuple(sorted({trial.number for each in keys for trial in each.near_misses})),
        dead_ends=tuple(each.key for each in keys if each.is_dead_end),
        keys=tuple(keys),
        untried_keys=tuple(untried(keys, now, used_keys)),
        damaged=(*damaged, *unfit.values()),
    )


def _value_of(config: Config, key: str) -> str:
    value = config.resolved.get(key, ABSENT)
    if isinstance(value, dict | list):
        return spelled(value)
    return _text(str(type(value)), value)  # 1 is 1.0, and spelled otherwise


@lru_cache(maxsize=10_000)  # thousands of experiments share a few values a key
def _text(kind: str, value: Any) -> str:
    return spelled(value)


def _spans(
    key: str, records: Sequence[Record], configs_by_number: Mapping[int, Config], items: Mapping[int, _Rest]
) -> Iterator[Span]:
    """From rejected to rejected value, for every set of other keys; apart where a kept one lies between."""
    tried: dict[_Rest, dict[float, bool]] = {}  # value -> was it ever kept
    for record in records:
        config = configs_by_number.get(record.number)
        value = config.resolved.get(key) if config else None
        if config is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        rest = items[record.number] - {(key, _value_of(config, key))}
        values = tried.setdefault(rest, {})
        values[value] = values.get(value, False) or record.is_keep
    for values in tried.values():
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
