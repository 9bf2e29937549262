"""Commits of decisions. Each sets the keys of one change in the train.toml at HEAD; all other lines stay as they are.
Also the decisions that the user's own commits make."""

import tomllib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nightshift.campaign.git import CONFIG_NAME, Head, Repo
from nightshift.campaign.records import Action, Change, Decision, PlannedCommit, Record
from nightshift.config.allowlist import KEYS, Kind, Value, accept, find_key, shorten
from nightshift.config.train_toml import ABSENT, UNSET, Config, changed_keys, diff, parse, set_values, spelled
from nightshift.errors import ConfigError, UsageError
from nightshift.files import read_file, write_atomically
from nightshift.text import clean

MAX_SUBJECT = 71  # characters
UNREAD = "your own commits to train.toml since the last experiment cannot be read"  # in read-only commands
_PATHS = {key.path for key in KEYS}
_UNSET = {key.path for key in KEYS if key.default is None}
Values = dict[str, str]  # by dotted key, spelled as in `Change.keys`
Validate = Callable[[Config], object]  # raises UsageError for an invalid config


def incumbent_values(baseline: Config, kept: Iterable[Change] = ()) -> Values:
    """Return the values of train.toml with the kept changes, which are in the order in which they were kept. A key
    whose value and default are None is left out, as in the file."""
    values: dict[str, str | None] = {key: spelled(value) for key, value in baseline.values.items()}
    for change in kept:
        values |= change.keys
    unset = {key for key, text in values.items() if text == spelled(None) and key in _UNSET}
    return {key: text for key, text in values.items() if text is not None and key not in unset}


def incumbent_config(baseline: Config, kept: Iterable[Change]) -> Config:
    """Return the baseline's train.toml with the kept changes. UsageError if the result is invalid."""
    return _edit(baseline, incumbent_values(baseline, kept))


def change_keys(before: Config, after: Config) -> dict[str, str | None]:
    """Return the keys whose effective values differ, with the values of `after` as in `Change.keys`."""
    values = after.values
    return {key: spelled(values[key]) if key in values else None for key in changed_keys(before, after)}


def plan(
    baseline: Config,
    kept: Sequence[Change],
    decisions: Iterable[Decision],
    reason: Callable[[Decision], str],
    validate: Validate,
) -> tuple[list[PlannedCommit], list[Decision], tuple[Change, ...], list[tuple[Decision, str]]]:
    """Plan the commits of one run's decisions in their order. Each commit must leave a valid train.toml, for which
    `validate` raises nothing. If it would not, the decision is tried again after each later commit. Return the commits,
    their decisions, the kept changes after them, and each refused decision with its cause."""
    steps, planned, refused = list[PlannedCommit](), list[Decision](), list[tuple[Decision, str]]()
    kept, before = tuple(kept), incumbent_values(baseline, kept)
    waiting = [decision for decision in decisions if decision.action is not Action.DISCARD]
    while waiting:
        decision = waiting.pop(0)
        try:
            kept_after = tuple(change for change in kept if change != decision.change)
            if decision.action is not Action.REVERT:
                kept_after = (*kept, decision.change)
            after = incumbent_values(baseline, kept_after)
            validate(_edit(baseline, after))
        except UsageError as error:
            refused.append((decision, str(error)))
            continue
        keys = {key: (before.get(key), text) for key, text in _changed(before, after).items()}
        name = f"{decision.action} {decision.change.name}"
        steps.append(PlannedCommit(name=name, keys=keys, reason=reason(decision)))
        planned.append(decision)
        kept, before = kept_after, after
        waiting, refused = [*(decision for decision, _ in refused), *waiting], []
    return steps, planned, kept, refused


def commit(repo: Repo, head: Head, steps: Sequence[PlannedCommit], others: Container[str] = ()) -> list[str | None]:
    """Commit the steps that are not committed yet. Keys that the user has set since stay as they are. `head`: the
    branch, and a commit from before the steps. `others`: ids of other experiments' commits. Return the ids, None for a
    step that changes no value. UsageError if another branch is checked out or train.toml at HEAD is invalid."""
    if not steps:
        return []
    tip, history = repo.head(), repo.config_history(head)
    if tip.branch != head.branch:
        raise UsageError(f"the checkout moved from {head} to {tip}")
    by_name = {entry.subject.partition(":")[0]: entry.id for entry in history if entry.id not in others}
    ids = [by_name.get(step.name) for step in steps]
    while ids and ids[-1] is None:  # the rest was not reached before a kill
        ids.pop()
    config = parse(repo.config_at(tip.commit or "") or b"")
    for step in steps[len(ids) :]:
        values, edited, commit_id = incumbent_values(config), config, None
        keys = {key: after for key, (before, after) in step.keys.items() if values.get(key) == before}
        with suppress(ConfigError):
            edited = _edit(config, incumbent_values(config, [Change(keys=keys)]))
        if edited.source != config.source:
            message = f"{_subject(step.name, config, edited)}\n\n{step.reason}"
            tip = repo.commit_files(tip, {CONFIG_NAME: edited.source}, message)
            commit_id = tip.commit
        ids.append(commit_id)
        config = edited
    return ids


def revert(repo: Repo, baseline: Config, kept: Sequence[Change], change: Change) -> Head:
    """Take a kept change out of train.toml by a commit of the user's, which needs no lock. Keys that a later change has
    set stay. Return the new HEAD. UsageError if train.toml has uncommitted changes, if later changes set all keys, or
    if train.toml would be invalid without the change."""
    head, path = repo.head(), repo.root / CONFIG_NAME
    config = parse(repo.config_at(head.commit or "") or b"")
    before = incumbent_values(baseline, kept)
    after = incumbent_values(baseline, [other for other in kept if other != change])
    if incumbent_values(config) != before:
        fix = "The next experiment or start commits them; then run the command again."
        raise UsageError(f"not all decisions are committed to {head} yet", fix)
    if repo.changes(CONFIG_NAME) or not path.is_file() or read_file(path) != config.source:
        fix = f"Commit them, or restore the file: git restore --staged --worktree {CONFIG_NAME}"
        raise UsageError(f"{CONFIG_NAME} has changes that are not committed", fix)
    if before == after:
        raise UsageError(f"{change.name} is replaced: later changes set its keys", "Revert those changes, if any.")
    edited = _edit(config, after)
    head = repo.commit_files(head, {CONFIG_NAME: edited.source}, _subject(f"Revert {change.name}", config, edited))
    write_atomically(path, edited.source)
    return head


def decisions_since(
    repo: Repo, records: Sequence[Record], branch: str, baseline: Config, kept: Sequence[Change]
) -> tuple[Decision, ...]:
    """Return the decisions of the user's commits since the last experiment of a branch, oldest first; none while a
    commit of Nightshift is owed. A commit that restores the values from before a kept change reverts the change. The
    other keys of a commit are a change that the user keeps. A reset or rebased branch counts as one edit. UsageError
    if the branch is gone or its train.toml is invalid, EngineError if git fails."""
    ours = [record for record in records if record.branch == branch]
    if any(r.judgement and r.judgement.steps for r in ours if r.git_action is None or r.git_error):
        return ()
    head = repo.head()
    commit = head.commit if head.branch == branch else repo.branches().get(branch)
    if commit is None:
        raise UsageError(f"git has no branch {branch or 'of a detached HEAD'}")
    decisions = list[Decision]()
    known = {id for record in ours for id in record.commits.values()}
    known |= {decision.commit for record in ours for decision in record.user_decisions if decision.commit}
    for entry in repo.config_history(Head(branch, ours[-1].commit)) if ours else []:
        if entry.id not in known:
            with suppress(ConfigError):  # an invalid train.toml, which a later commit may have mended
                changed = _changed(*(incumbent_values(parse(text)) for text in (entry.before, entry.after)))
                kept = _edited_by_user(baseline, kept, changed, entry.id, decisions)
    # The rest of the difference: the branch was reset or rebased.
    left = _changed(incumbent_values(baseline, kept), incumbent_values(parse(repo.config_at(commit) or b"")))
    _edited_by_user(baseline, kept, left, commit, decisions)
    return tuple(decisions)


def _edited_by_user(
    baseline: Config,
    kept: Sequence[Change],
    changed: Mapping[str, str | None],
    commit: str,
    decisions: list[Decision],
) -> Sequence[Change]:
    """Append the decisions of an edit to `decisions`. Return the kept changes after it."""
    before = incumbent_values(baseline, kept)
    wanted = {key: text for key, text in {**before, **changed}.items() if text is not None}
    while (undone := _undone(baseline, kept, before, wanted)) is not None:
        kept = [change for change in kept if change != undone]
        before = incumbent_values(baseline, kept)
        if edits := [decision for decision in decisions if decision.change == undone]:
            decisions.remove(edits[-1])  # the user took an edit back: no decision is left
        else:
            decisions.append(Decision(change=undone, action=Action.REVERT, commit=commit))
    if keys := _changed(before, wanted):
        kept = [*kept, Change(keys=keys, commit=commit)]
        decisions.append(Decision(change=kept[-1], action=Action.KEEP, commit=commit))
    return kept


def _undone(baseline: Config, kept: Sequence[Change], before: Values, wanted: Values) -> Change | None:
    """Return the last kept change whose keys would all have the wanted values without the change."""
    for change in reversed(kept):
        without = incumbent_values(baseline, [other for other in kept if other != change])
        changed = _changed(before, without)
        if changed and not changed.keys() & _changed(without, wanted).keys():
            return change
    return None


def _value(key: str, text: str) -> Value:
    """Return the value of a text in `Change.keys`, which has strings without quotes, and `on` for a table."""
    row = find_key(key)
    if row is None:
        raise ConfigError(f"{shorten(clean(key), 80)} is not an open key")
    value: Any = text
    with suppress(tomllib.TOMLDecodeError):
        value = tomllib.loads(f"value = {text}")["value"]
    return accept(row, {} if row.kind is Kind.TABLE and text == "on" else value)


def _changed(before: Values, after: Values) -> dict[str, str | None]:
    """Return the keys whose values differ, with the new values; None for a key that is not in `after`."""
    keys = dict.fromkeys([*before, *after])
    return {key: after.get(key) for key in keys if before.get(key) != after.get(key)}


def _edit(config: Config, values: Values) -> Config:
    """Return `config` with these values in its text. UsageError if no valid train.toml has exactly these values."""
    texts = _changed(incumbent_values(config), values)
    changes = {key: ABSENT if text is None else _value(key, text) for key, text in texts.items()}
    try:
        edited = parse(set_values(config.source, changes))
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # a table is split over the file
        fix = "Write each table of train.toml in one place, its keys before its sub-tables."
        raise UsageError(f"train.toml cannot be edited: {error}", fix) from None
    # Removing a table removes its keys, and a key in a table switches the table on.
    if wrong := _changed(values, incumbent_values(edited)):
        raise UsageError(f"{next(iter(wrong))} conflicts with the other kept changes")
    return edited


def _subject(name: str, before: Config, after: Config) -> str:
    """Return `keep 0012: lr 3e-6 → 5e-6`."""
    items = (f"{short_key(c.key)} {c.old or UNSET} → {c.new or UNSET}" for c in diff(before, after))
    return clean(shorten(f"{name}: {', '.join(items)}", MAX_SUBJECT))


def short_key(key: str) -> str:
    """Return the shortest end of a key that is unique among the open keys: `lr`, `optim.type`."""
    parts = key.split(".")
    ends = (".".join(parts[-n:]) for n in range(1, len(parts)))
    return next((end for end in ends if not any(path.endswith(f".{end}") for path in _PATHS - {key})), key)
