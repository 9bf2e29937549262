"""The memory of ideas: what a campaign has tried, by the keys that it touched."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import Ledger
from nightshift.errors import ConfigError, UsageError
from nightshift.records import Record, Verdict
from nightshift.train_toml import config as configs
from nightshift.train_toml import keys
from nightshift.train_toml.config import Config
from nightshift.train_toml.values import Kind, Value, shorten, value_text

MANY_TRIALS = 3  # of one key by itself, all clearly worse: a dead end
ABSENT = "-"  # shown where a key did not apply
_TEXT = 160  # characters of a description or lesson
_WIDTH = 118

_Rest = frozenset[tuple[str, str]]  # a config without one key, canonical


@dataclass(frozen=True, slots=True)
class Trial:
    """What one experiment did to one key; `before` is the incumbent's value of that time."""

    number: int
    before: str  # as train.toml spells it; ABSENT where the key did not apply
    after: str
    value: Value  # `after`, parsed
    verdict: Verdict
    delta: float | None  # posterior mean and its standard error, fractions; None for a crash
    delta_stderr: float | None
    others: tuple[str, ...]  # keys that changed with it
    description: str
    lesson: str | None
    is_taken_back: bool = False

    @property
    def said(self) -> str:
        """The verdict in words."""
        return "taken back" if self.is_taken_back else str(self.verdict)

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
        return float("-inf") if self.delta is None else self.delta + (self.delta_stderr or 0.0)


@dataclass(frozen=True, slots=True)
class Span:
    """The values between two tried and rejected ones, all other keys equal: covered.

    `around` is the kept value between them, where there is one: what is left to gain lies near it.
    """

    low: float
    high: float
    around: str | None = None

    def __str__(self) -> str:
        text = f"{value_text(self.low)} .. {value_text(self.high)}"
        return text + (f" (around {self.around})" if self.around else "")


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

    def is_covered(self, value: float) -> bool:
        """True if the value lies strictly inside a covered span."""
        return any(span.low < value < span.high for span in self.covered)


def load_configs(ledger: Ledger, records: Sequence[Record]) -> dict[int, Config]:
    """The submitted configs by experiment number; those that are gone or refused by today's allow-list are left out."""
    found = {}
    for record in records:
        try:
            found[record.number] = configs.parse(ledger.source(record.number))
        except (ConfigError, OSError):
            continue
    return found


def history(campaign: Campaign, configs_by_number: Mapping[int, Config]) -> list[KeyHistory]:
    """The decided experiments of one campaign, grouped by key: the most tried first."""
    records = campaign.decided
    trials: dict[str, list[Trial]] = {}
    gone = {record.number for record in campaign.taken_back}
    for record in records:
        candidate = configs_by_number.get(record.number)
        parent = configs_by_number.get(record.parent) if record.parent is not None else None
        if candidate is None or parent is None or record.judgement is None:
            continue
        changes = dict(_changes(parent, candidate))
        for key, (before, after) in changes.items():
            others = tuple(other for other in changes if other != key)
            trial = _trial(record, before, after, candidate.resolved.get(key), others)
            trials.setdefault(key, []).append(replace(trial, is_taken_back=record.number in gone))
    best = incumbent(campaign, configs_by_number)
    found = [
        KeyHistory(
            key,
            _spelled(best, key) if best else ABSENT,
            tuple(of_key),
            tuple(dict.fromkeys(_spans(key, records, configs_by_number))),
        )
        for key, of_key in trials.items()
    ]
    return sorted(found, key=lambda each: (-len(each.trials), each.key))


def incumbent(campaign: Campaign, configs_by_number: Mapping[int, Config]) -> Config | None:
    """The config that the campaign has arrived at; None before the baseline, or where its file is gone."""
    return configs_by_number.get(campaign.incumbent.number) if campaign.incumbent else None


def untried(histories: Sequence[KeyHistory], now: Config, used_keys: AbstractSet[str] | None) -> list[str]:
    """Open keys that the engine uses (None: all), that apply under the config `now`, and that nobody has touched."""
    touched = {each.key for each in histories}
    paths = dict.fromkeys(key.path for key in keys.KEYS if keys.ANY not in key.path)
    return [
        path
        for path in paths
        if path not in touched and path in now.resolved and (used_keys is None or path in used_keys)
    ]


def describe(histories: Sequence[KeyHistory], untried_keys: Sequence[str], max_lines: int = 120) -> str:
    """Aligned plain text for a person, at most `max_lines` long."""
    lines = []
    numbers = {trial.number for each in histories for trial in each.trials}
    kept = {t.number for each in histories for t in each.trials if t.verdict is Verdict.KEEP}
    back = {t.number for each in histories for t in each.trials if t.is_taken_back}
    told = f"{len(kept)}" + (f" ({len(back)} taken back)" if back else "")
    lines.append(f"experiments: {len(numbers)}, kept: {told}, keys touched: {len(histories)}")
    for each in histories:
        lines += ["", f"{each.key}  now {each.now}{'  dead end' if each.is_dead_end else ''}", *_rows(each)]
        if each.covered:
            lines.append(f"  covered: {', '.join(map(str, each.covered))}")
    if untried_keys:
        lines += [
            "",
            "untried:",
            *textwrap.wrap(", ".join(untried_keys), _WIDTH, initial_indent="  ", subsequent_indent="  "),
        ]
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], f"... {len(lines) - max_lines + 1} lines more; runs/ has everything"]
    return "\n".join(lines)


def brief_lines(histories: Sequence[KeyHistory], untried_keys: Sequence[str], max_characters: int = 2000) -> list[str]:
    """The same for an agent's brief, the most useful first; line ends included, at most `max_characters` long."""
    misses = [f"{each.key} = {t.after} ({_numbers(t)})" for each in histories for t in each.near_misses]
    dead = [each.key for each in histories if each.is_dead_end]
    covered = [f"{each.key} {span}" for each in histories for span in each.covered]
    lines = [
        shorten(f"{title}: {', '.join(items)}", max(max_characters // 4, 40))
        for title, items in (
            ("near misses", misses),
            ("dead ends", dead),
            ("covered", covered),
            ("untried keys", untried_keys),
        )
        if items
    ]
    for each in histories:
        tried = "; ".join(f"{t.after} {t.said}{f' {_numbers(t)}' if t.delta is not None else ''}" for t in each.trials)
        lines.append(shorten(f"{each.key}, now {each.now}: {tried}", 300))
    taken, room = [], max_characters
    for line in lines:
        if len(line) + 1 > room:
            break
        taken.append(line)
        room -= len(line) + 1
    return taken


def of_last_campaign(ledger: Ledger, used_keys: AbstractSet[str] | None = None) -> str:
    """`describe` for the campaign of the last experiment. Without `used_keys`, the untried keys are those of
    train.toml alone. Raises UsageError before the baseline.
    """
    campaign = Campaign.last(ledger.records())
    found = load_configs(ledger, campaign.decided)
    now = incumbent(campaign, found)
    if now is None:
        raise UsageError("no experiment was decided here yet", "Start one: uv run run.py.")
    if used_keys is None:
        used_keys = set(now.values) - {key for record in campaign.decided for key in record.unused_keys}
    histories = history(campaign, found)
    return describe(histories, untried(histories, now, used_keys))


def _rows(each: KeyHistory) -> Iterator[str]:
    changes = [f"{trial.before} -> {trial.after}" for trial in each.trials]
    width = min(max(map(len, changes)), 40)
    for trial, change in zip(each.trials, changes, strict=True):
        note = f" (with {', '.join(trial.others)})" if trial.others else ""
        numbers = _numbers(trial) + (" near miss" if trial.is_near_miss else "")
        head = f"  {trial.number:04d}  {change:{width}}  {trial.said:10}  {numbers:24}"
        yield f"{head}  {trial.description}{note}".rstrip()
        if trial.lesson:
            yield f"        lesson: {trial.lesson}"


def _numbers(trial: Trial) -> str:
    if trial.delta is None:
        return ""
    error = f" +- {100 * trial.delta_stderr:.1f}" if trial.delta_stderr is not None else ""
    return f"{100 * trial.delta:+.1f}{error} pp"


def _trial(record: Record, before: str, after: str, value: Value, others: tuple[str, ...]) -> Trial:
    assert record.judgement is not None
    return Trial(
        number=record.number,
        before=before,
        after=after,
        value=value,
        verdict=record.judgement.verdict,
        delta=record.judgement.delta,
        delta_stderr=record.judgement.delta_stderr,
        others=others,
        description=_clean(record.description),
        lesson=_clean(record.lesson) if record.lesson else None,
    )


def _changes(parent: Config, candidate: Config) -> Iterator[tuple[str, tuple[str, str]]]:
    """Keys whose effective value differs. What merely stopped to apply, because a variant changed, was not touched."""
    for key in dict.fromkeys([*candidate.values, *parent.values]):
        before, after = _spelled(parent, key), _spelled(candidate, key)
        if key in candidate.resolved and before != after:
            yield key, (before, after)


def _spelled(config: Config, key: str) -> str:
    if key not in config.resolved:
        return ABSENT
    value = config.resolved[key]
    if isinstance(value, dict):
        return "on"
    if isinstance(value, tuple):
        value = tuple(sorted(value))  # their order means nothing
    return "None" if value is None else value if isinstance(value, str) else value_text(value, 200)


def _spans(key: str, records: Sequence[Record], configs_by_number: Mapping[int, Config]) -> Iterator[Span]:
    """From rejected to rejected value, for every set of other keys; apart where a kept one lies between."""
    tried: dict[_Rest, dict[float, tuple[str, bool]]] = {}
    for record in records:
        config = configs_by_number.get(record.number)
        value = config.resolved.get(key) if config else None
        if config is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        rest = frozenset((path, _spelled(config, path)) for path in config.resolved if path != key)
        was_kept = tried.get(rest, {}).get(float(value), ("", False))[1]  # a config that was run again
        tried.setdefault(rest, {})[float(value)] = (_spelled(config, key), was_kept or _is_kept(record))
    for values in tried.values():
        last: float | None = None
        low: float | None = None  # of the rejected values since the last kept one
        around: str | None = None
        for value in sorted(values):
            text, is_kept = values[value]
            if is_kept:
                if low is not None and last is not None and low < last:
                    yield Span(low, last)
                low, around = None, text
            else:
                if around is not None and last is not None:
                    yield Span(last, value, around)
                low, around = value if low is None else low, None
                last = value
        if low is not None and last is not None and low < last:
            yield Span(low, last)


def _is_kept(record: Record) -> bool:
    return record.judgement is not None and record.judgement.verdict is Verdict.KEEP


def _choices(key: str) -> set[str]:
    """All spellings of a key with few of them; empty for numbers and lists."""
    entry = next(iter(keys.variants(tuple(key.split(".")))), None)
    if entry is None or entry.kind not in (Kind.CHOICE, Kind.BOOL, Kind.TABLE):
        return set()
    return {Kind.BOOL: {"true", "false"}, Kind.TABLE: {"on", "None"}}.get(entry.kind, set(entry.choices))


def _clean(text: str) -> str:
    """Foreign text on one line, without control characters."""
    return shorten(" ".join("".join(c if c.isprintable() else " " for c in text).split()), _TEXT)
