"""What a campaign tried, by key: `Memory`, for the brief, the evidence and `nightshift history`."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from msgspec.structs import replace

from nightshift.campaign.campaign import Campaign, fold
from nightshift.campaign.commits import incumbent_config
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Z95, Change, Effect, Failure, Record, Verdict
from nightshift.campaign.results import last_campaign
from nightshift.config.allowlist import BY_PRESET, KEYS
from nightshift.config.train_toml import Config, changes_of, parse, spelled
from nightshift.config.values import value_text
from nightshift.errors import UsageError
from nightshift.files import Document

MANY = 3  # changes of one key by itself, all worse: dead ends together
REJECTED = ("", "reverted")  # Campaign.since: the change was discarded, reverted or crashed
UNSET = "unset"  # a key without a value, whatever train.toml or prime-rl call that: None, off, no such key

_Rest = frozenset[tuple[str, str | None]]  # what a trial's config sets besides the key, without a rider


@dataclass(frozen=True, slots=True)
class Trial:
    """What one experiment did to one key; `before` is the incumbent's value of that time."""

    number: int
    before: str  # as train.toml spells the value, or UNSET
    after: str
    verdict: Verdict
    effect: Effect | None  # of the whole change, as it is believed now; None if no run measured it
    others: tuple[str, ...]  # keys of the same change
    since: str = ""  # what became of the change: see Campaign.since
    starts: str = ""  # which start of its config it is, if not the first

    def __str__(self) -> str:
        words = [
            " ".join(filter(None, (self.verdict, self.since))),
            str(self.effect or ""),
            f"(with {', '.join(self.others)})" if self.others else "",
            f"[{self.starts}]" if self.starts else "",
        ]
        return f"{self.number:04d}  {self.before} -> {self.after}  {' '.join(filter(None, words))}"


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
    now: str  # the incumbent's value, or UNSET
    trials: tuple[Trial, ...]
    covered: tuple[Span, ...]


class Memory(Document, frozen=True, kw_only=True, tag="history"):
    """What one campaign tried. `kept`: the incumbent's changes, the most certain first. `keys`: the most tried first.
    `damaged`: files that could not be read.

    `near_misses`: rejected changes that the incumbent does not hold, with an effect within one standard deviation of 0,
    or above; the best first. `dead_ends`: rejected changes of one key that crashed, whose 95 % interval lies below 0,
    or that are MANY and all worse (by more than one standard deviation).
    """

    branch: str
    rules_hash: str
    kept: tuple[str, ...]
    near_misses: tuple[str, ...]
    dead_ends: tuple[str, ...]
    keys: tuple[KeyHistory, ...]
    untried_keys: tuple[str, ...]
    damaged: tuple[str, ...] = ()

    @property
    def summary(self) -> list[str]:
        """Near misses, dead ends, covered values and untried keys, one line each."""
        lists = {
            "near misses": self.near_misses,
            "dead ends": self.dead_ends,
            "covered": [f"{history.key} {span}" for history in self.keys for span in history.covered],
            "untried keys": self.untried_keys,
        }
        return [f"{title}: {'; '.join(items)}" for title, items in lists.items() if items]

    def __str__(self) -> str:
        """What is damaged, the kept changes, the summary, then each key with its trials."""
        lines = [f"damaged: {cause}" for cause in self.damaged]
        lines += ["kept, the most certain first:", *(f"  {line}" for line in self.kept)] if self.kept else []
        lines += self.summary
        for history in self.keys:
            lines += [f"{history.key}, now {history.now}:", *(f"  {trial}" for trial in history.trials)]
        return "\n".join(lines)


def load_configs(ledger: Ledger, records: Sequence[Record]) -> dict[int, Config]:
    """Return the submitted configs by experiment number, without those that are gone or that the allow-list refuses."""
    configs, parse_once = {}, cache(parse)  # runs with other seeds have the same config
    for record in records:
        with suppress(UsageError):
            configs[record.number] = parse_once(ledger.source(record.number))
    return configs


def history(
    campaign: Campaign,
    configs_by_number: Mapping[int, Config],
    now: Config,
    used_keys: AbstractSet[str] | None = None,
) -> Memory:
    """Return what a campaign tried in its decided experiments. A crash counts if the config caused it.

    Args:
        now: the incumbent's config.
        used_keys: the keys that the engine uses; None: all. Others are not listed as untried.
    """
    trials: dict[str, list[tuple[Trial, _Rest]]] = {}
    near_misses: list[tuple[float, str]] = []
    dead_ends: list[str] = []
    worse: dict[str, list[str]] = {}  # by key: changes of it alone that are worse
    hopeful = set[str]()  # keys with a change that is not worse
    for record in campaign.decided:
        candidate, new = configs_by_number.get(record.number), record.run.new
        is_counted = record.judgement is not None and record.failure in (None, Failure.TRAINING)
        if candidate is None or new is None or not is_counted:
            continue
        values = {key: text for change in (*record.run.kept, new) for key, text in change.keys.items()}
        # What merely stopped to apply, because a variant changed, was not touched.
        touched = {change.key: change for change in changes_of(record.diff) if change.key in candidate.resolved}
        effect, since = campaign.effect(record), campaign.since(record)
        for key, change in touched.items():
            trial = Trial(
                number=record.number,
                before=_word(change.old),
                after=_word(change.new),
                verdict=Verdict(record.status),
                effect=effect,
                others=tuple(other for other in touched if other != key),
                since=since,
                starts=record.starts,
            )
            rest = frozenset(item for item in values.items() if item[0] != key)
            trials.setdefault(key, []).append((trial, rest))
        line = f"{record.number:04d} {effect or record.status}: "
        line += ", ".join(f"{key} = {_word(change.new)}" for key, change in touched.items())
        is_held = all(_word(change.new) == _value(key, now) for key, change in touched.items())
        is_worse = since in REJECTED and (effect is None or effect.mean + effect.sd < 0)
        if not is_worse:
            hopeful |= touched.keys()
        elif len(touched) == 1:
            worse.setdefault(min(touched), []).append(line)
            dead_ends += [line] if effect is None or effect.mean + Z95 * effect.sd < 0 else []
        if not is_worse and since in REJECTED and not is_held and effect is not None:
            near_misses.append((effect.mean, line))
    dead_ends += [line for key, lines in worse.items() if len(lines) >= MANY and key not in hopeful for line in lines]
    assert campaign.baseline is not None
    return Memory(
        branch=campaign.baseline.branch,
        rules_hash=campaign.baseline.rules_hash,
        kept=tuple(kept_changes(campaign)),
        near_misses=tuple(line for _, line in sorted(near_misses, reverse=True)),
        dead_ends=tuple(sorted({*dead_ends})),
        keys=tuple(
            KeyHistory(key, _value(key, now), tuple(trial for trial, _ in pairs), tuple(dict.fromkeys(_spans(pairs))))
            for key, pairs in sorted(trials.items(), key=lambda item: (-len(item[1]), item[0]))
        ),
        untried_keys=tuple(
            path
            for path in dict.fromkeys(key.path for key in KEYS)
            if path in now.resolved and path not in trials and (used_keys is None or path in used_keys)
        ),
    )


def kept_changes(campaign: Campaign) -> list[str]:
    """Return the kept changes, the most certain first, one a line."""
    if campaign.posterior is None:
        return []
    effect = campaign.posterior.effect
    return [
        describe_change(campaign, change, ", confirmed" if campaign.is_confirmed(change) else ", unconfirmed")
        for change in sorted(campaign.kept, key=lambda change: -effect(change).p_helps)
    ]


def describe_change(campaign: Campaign, change: Change, support: str = "") -> str:
    """Return name, effect, P(it helps), `support` and keys of a measured change."""
    assert campaign.posterior is not None
    return f"{change.name}  {campaign.posterior.effect(change).with_p}{support}: {change.settings}"


def of_last_campaign(ledger: Ledger) -> Memory:
    """Return the memory of the last experiment's campaign. Untried keys are those of train.toml: no engine is asked
    which keys it uses.

    Raises:
        UsageError: nothing was decided yet, or the baseline's train.toml is gone.
    """
    records, damaged = ledger.readable()
    campaign = fold(ledger, records, *last_campaign(records))
    if campaign.baseline is None:
        raise UsageError("no experiment was decided here yet", "Start one: uv run run.py.")
    now = incumbent_config(ledger.stored_config(campaign.baseline), campaign.kept)
    used_keys = set(now.values) - {key for record in campaign.decided for key in record.unused_keys}
    memory = history(campaign, load_configs(ledger, campaign.decided), now, used_keys)
    return replace(memory, damaged=tuple(damaged))


def _word(text: str | None) -> str:
    return UNSET if text in (None, "None", "off") else text


def _value(key: str, config: Config) -> str:
    """Return the value of a key as a record's diff spells it; UNSET for a key without one."""
    if key in BY_PRESET and key not in config.values:
        return "by preset"
    return _word(spelled(config.resolved[key]) if key in config.resolved else None)


def _spans(trials: Sequence[tuple[Trial, _Rest]]) -> Iterator[Span]:
    """Return the spans between neighbouring rejected numbers, for every set of other keys."""
    is_kept_by_value: dict[_Rest, dict[float, bool]] = {}
    for trial, rest in trials:
        values = is_kept_by_value.setdefault(rest, {})
        outcomes = [(trial.after, trial.since not in REJECTED)]
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
