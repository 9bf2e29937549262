"""One commit for each decision about one change: train.toml composed from the kept changes, and the commit's message.

The incumbent is the baseline plus the kept changes in the order of their adoption. A later change overrides the keys
that it shares with an earlier one. A commit sets the keys of one change in the text at HEAD, and leaves every other
line as the text has it.
"""

import tomllib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from nightshift.campaign.git import ConfigCommit, Head, Repo
from nightshift.campaign.records import Action, Change, Decision
from nightshift.campaign.standing import Z95
from nightshift.config.allowlist import KEYS, default, variants
from nightshift.config.toml_edit import ABSENT, set_values
from nightshift.config.train_toml import Config, diff, parse, spelled
from nightshift.config.values import Kind, Value, accept, shorten
from nightshift.errors import ConfigError, UsageError
from nightshift.text import clean

MAX_SUBJECT = 71  # characters
_PATHS = {key.path for key in KEYS}


class Step(NamedTuple):
    """A decision that changes the incumbent. `before` and `after`: the values of train.toml; `kept`: the changes after
    it, in the order of their adoption."""

    decision: Decision
    before: dict[str, Value]
    after: dict[str, Value]
    kept: tuple[Change, ...]

    @property
    def name(self) -> str:
        """The first words of the commit's subject: `keep 0012`."""
        return f"{self.decision.action} {self.decision.change.experiment:04d}"


class Plan(NamedTuple):
    """The commits of one decision round, in order. `refused`: the cause, for each decision that cannot be made."""

    steps: list[Step]
    refused: list[tuple[Decision, str]]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a decision was made, for the body of its commit. `run`: the experiment after which it was made."""

    run: int
    p_helps: float | None = None  # P(the effect of the change is above 0)
    measured_by: tuple[int, ...] = ()  # the experiments that ran the change
    hypothesis: str = ""
    journal: str = ""  # hash of the journal's last line
    agent: str = ""  # a remark on the agent: "not isolated"


class UserEdit(NamedTuple):
    """A commit that is not the harness's and changes values of train.toml: the new value of each key, as `Change`."""

    commit: str
    keys: dict[str, str | None]


def incumbent_values(baseline: Config, kept: Iterable[Change]) -> dict[str, Value]:
    """Return the values of train.toml with the kept changes, in the order of their adoption.

    Raises:
        ConfigError: a value is not allowed.
    """
    values = dict(baseline.values)
    for change in kept:
        for key, text in change.keys.items():
            if text is None:
                values.pop(key, None)
            else:
                values[key] = _value(key, text)
    return values


def plan(baseline: Config, kept: Sequence[Change], decisions: Iterable[Decision]) -> Plan:
    """Order the decisions of one round: reverts first, then the largest effect first.

    Each commit must leave a valid train.toml. A decision that would not waits for the others; if it is still invalid
    after them, it is refused, and the others are made. So a change that another kept change depends on cannot leave
    before that one, and of two changes that are valid only together neither can join: they are one change.
    """
    steps: list[Step] = []
    kept = tuple(kept)
    before = incumbent_values(baseline, kept)
    waiting = sorted((d for d in decisions if d.action is not Action.DISCARD), key=_order)
    while waiting:
        refused = []
        for decision in waiting:
            try:
                remaining = _kept_after(kept, decision)
                after = incumbent_values(baseline, remaining)
                _edited(baseline, after)
            except UsageError as error:
                refused.append((decision, str(error)))
                continue
            steps.append(Step(decision, before, after, remaining))
            waiting.remove(decision)
            before, kept = after, remaining
            break
        else:
            return Plan(steps, refused)
    return Plan(steps, [])


def commit(
    repo: Repo, head: Head, steps: Sequence[Step], reason: Callable[[Decision], Reason]
) -> list[tuple[Step, str | None]]:
    """Commit each step on the campaign's branch; return the commits' ids.

    A call that is repeated after a kill commits only the steps that train.toml at HEAD does not hold yet. A step that
    leaves all values as they are has no commit: its id is None.

    Args:
        head: the branch, and a commit on it from before the steps.

    Raises:
        UsageError: the checkout left the branch, or train.toml at HEAD is the incumbent of none of the steps.
    """
    if not steps:
        return []
    tip, history = repo.head(), repo.config_history(head)
    config = parse(repo.config_at(tip.commit or "") or b"")
    num_done = _num_done(config, steps, history)
    ids = [_id_of(step, history) for step in steps[:num_done]]
    for step in steps[num_done:]:
        if step.after == step.before:
            ids.append(None)
            continue
        edited = _edited(config, step.after)
        tip = repo.commit_config(tip, edited.source, message(step, config, edited, reason(step.decision)))
        ids.append(tip.commit)
        config = edited
    return list(zip(steps, ids, strict=True))


def message(step: Step, before: Config, after: Config, reason: Reason) -> str:
    """Return the commit message: a subject below 72 characters, the evidence, the hypothesis, and the trailers."""
    effect, stderr = step.decision.effect, step.decision.effect_stderr
    parts = []
    if effect is not None and stderr is not None:
        parts.append(f"effect {100 * effect:+.1f} ± {100 * Z95 * stderr:.1f} pp")
    if reason.p_helps is not None:
        parts.append(f"P(it helps) {100 * reason.p_helps:.0f} %")
    if reason.measured_by:
        parts.append("measured by " + ", ".join(f"{number:04d}" for number in reason.measured_by))
    trailers = {"Run": f"{reason.run:04d}", "Journal": clean(reason.journal), "Agent": clean(reason.agent)}
    paragraphs = [
        _subject(step, before, after),
        f"Evidence: {', '.join(parts)}" if parts else "",
        # With the label, and not in the last paragraph, no hypothesis is a trailer.
        f"Hypothesis: {clean(reason.hypothesis)}" if reason.hypothesis else "",
        "\n".join(f"Nightshift-{name}: {text}" for name, text in trailers.items() if text),
    ]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def user_edits(repo: Repo, head: Head, ours: Container[str]) -> list[UserEdit]:
    """List the commits since `head.commit` that change values of train.toml and are not in `ours`, oldest first.

    A text can be forged and `git revert` copies no trailer, so only the ids in `ours` decide. A commit whose train.toml
    is refused counts with the next one. A branch that no longer holds `head.commit` (reset or rebased) is one edit.

    Raises:
        ConfigError: train.toml at HEAD is refused.
    """
    edits: list[UserEdit] = []
    refusal, last = None, None
    for entry in repo.config_history(head):
        try:
            last = last or parse(entry.before)
            config = parse(entry.after)
        except ConfigError as error:
            refusal = error
            continue
        refusal = None
        keys = _changed(last.values, config.values)
        if keys and (entry.is_rewritten or entry.id not in ours):
            edits.append(UserEdit(entry.id, {key: None if v is ABSENT else spelled(v) for key, v in keys.items()}))
        last = config
    if refusal is not None:
        raise refusal
    return edits


def _order(decision: Decision) -> tuple[bool, float, int]:
    """Reverts first, the most harmful change first; then the others, the largest effect first."""
    is_revert, effect = decision.action is Action.REVERT, decision.effect or 0.0
    return not is_revert, effect if is_revert else -effect, decision.change.experiment


def _kept_after(kept: tuple[Change, ...], decision: Decision) -> tuple[Change, ...]:
    change = decision.change
    if (change in kept) != (decision.action is Action.REVERT):
        raise UsageError(f"change {change.experiment:04d} is {'' if change in kept else 'not '}kept already")
    return tuple(each for each in kept if each != change) if change in kept else (*kept, change)


def _value(key: str, text: str) -> Value:
    """The value that a `Change` holds as text: texts without quotes, a table as `on`."""
    entries = variants(key)
    if not entries:
        raise ConfigError(f"{shorten(clean(key), 80)} is no open key")
    if entries[0].kind is Kind.TABLE and text == "on":
        return {}
    value: Any = text
    with suppress(tomllib.TOMLDecodeError):
        value = tomllib.loads(f"value = {text}")["value"]
    return accept(entries[0], value)


def _changed(before: Mapping[str, Value], after: Mapping[str, Value]) -> dict[str, Any]:
    """The keys whose values differ, with the new values; ABSENT for a key that `after` does not hold."""
    keys = dict.fromkeys([*before, *after])
    return {key: after.get(key, ABSENT) for key in keys if before.get(key, ABSENT) != after.get(key, ABSENT)}


def _meant(values: Mapping[str, Value], config: Config) -> dict[str, Value]:
    """`values` without the keys that are off and off by default: `set_values` takes such a key out of the file."""
    return {k: v for k, v in values.items() if v is not None or default(k, config.resolved) is not None}


def _edited(config: Config, values: Mapping[str, Value]) -> Config:
    """The text of `config` with other values. UsageError if no valid train.toml has exactly these values."""
    changed = _changed(config.values, values)
    try:
        edited = parse(set_values(config.source, changed))
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # tables that do not fit into each other
        raise UsageError(f"no train.toml holds these values: {error}") from None
    # A table that is taken out takes along the keys of other changes; a key in a table switches the table on.
    if wrong := _changed(_meant(edited.values, edited), _meant(values, edited)):
        raise UsageError(f"{next(iter(wrong))} does not fit the other kept changes")
    return edited


def _num_done(config: Config, steps: Sequence[Step], history: Sequence[ConfigCommit]) -> int:
    """How many of the steps train.toml at HEAD holds."""
    states = [steps[0].before, *(step.after for step in steps)]
    done = [n for n, values in enumerate(states) if _meant(values, config) == _meant(config.values, config)]
    if not done:
        key = next(iter(_changed(steps[0].before, config.values)))
        raise UsageError(f"train.toml at HEAD is not the incumbent's: {key} differs", "Run the same command again.")
    # Steps that cancel each other leave the same values twice; then the commit's subject tells.
    named = [n for n in done if n and any(entry.subject.startswith(f"{steps[n - 1].name}:") for entry in history[-1:])]
    return max(named, default=done[0])


def _id_of(step: Step, history: Sequence[ConfigCommit]) -> str | None:
    """The commit that made a step, found by its subject."""
    ids = [entry.id for entry in history if entry.subject.startswith(f"{step.name}:")]
    return ids[-1] if ids else None


def _subject(step: Step, before: Config, after: Config) -> str:
    """`keep 0012: lr 3e-6 → 5e-6`, with as many keys as fit."""
    trained = {change.key: change for change in diff(before, after)}
    items = []
    for key in _changed(before.values, after.values):
        old, new = (spelled(c.values[key]) if key in c.values else None for c in (before, after))
        if key in trained:  # with prime-rl's default where the file is silent
            old, new = trained[key].old, trained[key].new
        items.append(f"{_short(key)} {old or 'unset'} → {new or 'unset'}")
    for num_shown in range(len(items), 0, -1):
        num_more = len(items) - num_shown
        more = f" and {num_more} more key{'' if num_more == 1 else 's'}" if num_more else ""
        head = f"{step.name}: {', '.join(items[:num_shown])}"
        if len(head + more) <= MAX_SUBJECT:
            break
    return clean(shorten(head, MAX_SUBJECT - len(more)) + more)


def _short(key: str) -> str:
    """The shortest end of a key that no other open key has: `lr`, `optim.type`."""
    parts = key.split(".")
    ends = (".".join(parts[-n:]) for n in range(1, len(parts)))
    return next((end for end in ends if not any(p.endswith(f".{end}") for p in _PATHS - {key})), key)
