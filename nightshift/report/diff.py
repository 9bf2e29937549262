"""train.toml compared key by key: experiments, commits, baseline, incumbent and the working file.

What counts is what trains: order, spelling and comments are no changes of a key. Changed comments are
listed beside the keys, because agents write their reasons there.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import Ledger
from nightshift.errors import UsageError
from nightshift.git.repo import CONFIG_NAME, Repo
from nightshift.records import Record, Verdict
from nightshift.train_toml.config import Change, Config, changes_of, diff, parse
from nightshift.train_toml.text import read_source
from nightshift.train_toml.values import quoted, shorten

WORKING, BASELINE, INCUMBENT = "working", "baseline", "incumbent"
_MARKS = {"changed": "~", "added": "+", "removed": "-"}
_COLOURS = {"changed": 33, "added": 32, "removed": 31, "comment": 2, "title": 1}  # ANSI


@dataclass(frozen=True, slots=True)
class Version:
    """One train.toml with the words for it."""

    label: str
    config: Config


@dataclass(frozen=True, slots=True)
class Difference:
    """What two versions differ in."""

    old: Version
    new: Version
    changes: tuple[Change, ...]
    notes: tuple[str, ...]  # the comment on the line of each change
    comments: tuple[tuple[str, str], ...]  # (kind, text): comments of unchanged keys, and stand-alone ones


def kept_chain(records: Sequence[Record], branch: str) -> list[Record]:
    """The baseline and the keeps that the incumbent of a branch stands on, in order, under the rules of its last keep.

    A keep that was taken back is not among them.
    """
    ours = [r for r in records if r.branch == branch]
    last = next((r for r in reversed(ours) if r.status == Verdict.KEEP), None)
    return list(Campaign.of(ours, branch, last.rules_hash).lineage) if last else []


def kept_here(ledger: Ledger, repo: Repo) -> list[Record]:
    """The kept chain of the branch that is checked out. Raises UsageError where nothing was measured."""
    branch = repo.head().branch
    chain = kept_chain(ledger.records(), branch)
    if not chain:
        where = f"branch {branch}" if branch else "this detached HEAD"
        raise UsageError(f"{where} has no baseline yet", "Run the first experiment: uv run run.py.")
    return chain


def find(name: str, root: Path, ledger: Ledger, repo: Repo) -> Version:
    """The train.toml that `name` means: 42, a commit, baseline, incumbent or working.

    Raises UsageError for another name, ConfigError where it names no valid train.toml.
    """
    if name == WORKING:
        return _version("working file", read_source(root / CONFIG_NAME))
    if name in (BASELINE, INCUMBENT):
        chain = kept_here(ledger, repo)
        record = chain[0] if name == BASELINE else chain[-1]
        return _experiment(record.number, ledger, f"{name} (experiment {record.number:04d})")
    if re.fullmatch(r"[0-9]{1,9}", name) and ledger.run_dir(int(name)).is_dir():
        return _experiment(int(name), ledger, f"experiment {int(name):04d}")
    source = repo.config_at(name) if name.isprintable() and not name.startswith("-") else None
    if source is None:
        raise UsageError(
            f"{quoted(shorten(name, 60))} is no experiment and no commit that holds a {CONFIG_NAME}",
            f"Give an experiment (42), a commit, {BASELINE}, {INCUMBENT} or {WORKING}.",
        )
    return _version(f"commit {name}", source)


def _experiment(number: int, ledger: Ledger, label: str) -> Version:
    try:
        return _version(label, ledger.source(number))
    except OSError as error:
        raise UsageError(
            f"{ledger.run_dir(number) / CONFIG_NAME} cannot be read ({error.strerror})", "Name another experiment."
        ) from None


def _version(label: str, source: bytes) -> Version:
    return Version(label, parse(source, label))


def compare(old: Version, new: Version) -> Difference:
    """Key-level and comment-aware."""
    changes = diff(old.config, new.config)
    old_notes, old_free = _comments(old.config.source)
    new_notes, new_free = _comments(new.config.source)
    changed = {change.key for change in changes}
    comments = [
        ("changed", f"{key}: {old_notes.get(key) or 'no comment'} -> {new_notes.get(key) or 'no comment'}")
        for key in new_notes | old_notes
        if key not in changed and _has(old, key) and _has(new, key) and old_notes.get(key) != new_notes.get(key)
    ]
    comments += [("added", text) for text in (Counter(new_free) - Counter(old_free)).elements()]
    comments += [("removed", text) for text in (Counter(old_free) - Counter(new_free)).elements()]
    return Difference(
        old=old,
        new=new,
        changes=changes,
        notes=tuple((old_notes if c.kind == "removed" else new_notes).get(c.key, "") for c in changes),
        comments=tuple(comments),
    )


def _has(version: Version, key: str) -> bool:
    return key in version.config.values or key.startswith("[")


def _comments(source: bytes) -> tuple[dict[str, str], list[str]]:
    """Comments by the key (or [table]) on whose line they stand, and those that stand on lines of their own."""
    import tomlkit  # slow to import
    from tomlkit.items import AbstractTable, Comment

    by_key: dict[str, str] = {}
    free: list[str] = []

    def walk(body: Iterable[Any], path: tuple[str, ...]) -> None:
        for key, item in body:
            if key is None:
                if isinstance(item, Comment):
                    free.append(item.trivia.comment)
                continue
            here = (*path, key.key)
            is_table = isinstance(item, AbstractTable)
            if comment := getattr(item.trivia, "comment", ""):
                by_key[f"[{'.'.join(here)}]" if is_table else ".".join(here)] = comment
            if is_table:
                walk(item.value.body, here)

    walk(tomlkit.parse(source.decode()).body, ())
    return by_key, free


def render(difference: Difference, colour: bool) -> str:
    """The difference for a person, one line a key."""
    title = f"{difference.old.label} -> {difference.new.label}"
    lines = [_paint(title, "title", colour)]
    for change, note in zip(difference.changes, difference.notes, strict=True):
        comment = _paint(f"    {_plain(note)}", "comment", colour) if note else ""
        lines.append(_paint(f"  {_plain(change.line)}", change.kind, colour) + comment)
    if not difference.changes:
        same = difference.old.config.source == difference.new.config.source
        lines.append("  the same bytes" if same else "  no key differs: both train the same")
    if difference.comments:
        lines.append(_paint("comments", "title", colour))
        for kind, text in difference.comments:
            lines.append(_paint(f"  {_MARKS[kind]} {_plain(text)}", kind, colour))
    return "\n".join(lines)


def as_json(difference: Difference) -> str:
    """The difference for tools, with typed values."""
    old, new = difference.old.config.resolved, difference.new.config.resolved
    changes = [
        {"key": c.key, "kind": c.kind, "old": old.get(c.key), "new": new.get(c.key), "comment": note or None}
        for c, note in zip(difference.changes, difference.notes, strict=True)
    ]
    comments = [{"kind": kind, "text": text} for kind, text in difference.comments]
    labels = {"old": difference.old.label, "new": difference.new.label}
    return json.dumps({**labels, "changes": changes, "comments": comments}, indent=1)


def chain_text(chain: Sequence[Record], colour: bool) -> str:
    """The kept experiments of a campaign, each with its expected difference and what it changed."""
    lines = []
    for record in chain:
        judgement = record.judgement
        delta = judgement.delta if judgement else None
        stderr = judgement.delta_stderr if judgement else None
        score = judgement.incumbent_score if judgement else None
        if record.parent is None:
            told = "baseline" + (f" {score:.4f}" if score is not None else "")
        elif delta is None:
            told = "delta not measured"
        else:
            told = f"{100 * delta:+.1f} pp" + (f" ± {196 * stderr:.1f}" if stderr is not None else "")
        title = f"{record.number:04d}  {told}  {_plain(record.description)}"
        lines.append(_paint(title.rstrip(), "title", colour))
        lines += [_paint(f"      {_plain(c.line)}", c.kind, colour) for c in changes_of(record.diff)]
    return "\n".join(lines)


def chain_json(chain: Sequence[Record]) -> str:
    """The kept experiments for tools. `delta` and `delta_stderr` are fractions, null where nothing was compared."""
    entries = [
        {
            "experiment": record.number,
            "description": record.description,
            "delta": record.judgement.delta if record.judgement else None,
            "delta_stderr": record.judgement.delta_stderr if record.judgement else None,
            "commit": record.kept_commit,
            "diff": list(record.diff),
        }
        for record in chain
    ]
    return json.dumps(entries, indent=1)


def _plain(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def _paint(text: str, kind: str, colour: bool) -> str:
    return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if colour else text
