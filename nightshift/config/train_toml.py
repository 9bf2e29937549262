"""train.toml: the one file that the agent edits. Read it, check it, refuse it.

Everything is checked here, against the allow-list in allowlist.py, before any engine sees it: prime-rl's own
validation imports whatever module an id names. Every refusal is one line, with the line number, the
value and the fix. `diff` tells what two of them train differently.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from nightshift.config.allowlist import (
    ANY,
    BY_PRESET,
    CURRICULUM,
    default,
    is_inner,
    is_name,
    lock,
    nearest,
    resolve,
    variants,
)
from nightshift.config.toml_text import MAX_LINE, document, line_of, read_source
from nightshift.config.values import Kind, Problem, Value, accept, quoted, shorten, value_text
from nightshift.errors import ConfigError


class _View:
    """The effective values; refuses with the key that the file writes."""

    def __init__(self, values: Mapping[str, Value], resolved: Mapping[str, Value]) -> None:
        self.values, self.resolved = values, resolved

    def __getitem__(self, path: str) -> Any:
        return self.resolved.get(path)

    def refuse(self, cause: str, fix: str, *paths: str) -> NoReturn:
        """Points at the first path that stands in the file; `cause` is a sentence of its own."""
        path = next((path for path in paths if path in self.values), paths[0])
        note = "" if path in self.values else " (the default)"
        text = "on" if self[path] == {} else value_text(self[path])
        raise Problem(f"{path} = {text}{note}: {cause}", fix, tuple(path.split(".")))


def check(values: Mapping[str, Value], resolved: Mapping[str, Value]) -> None:
    """Raises Problem for keys that do not go together, each of which is fine by itself."""
    view = _View(values, resolved)
    for rule in (_batch, _order, _lengths, _scheduler, _optimizer, _memory, _pools):
        rule(view)


def _batch(view: _View) -> None:
    batch, group = (f"orchestrator.{name}_size" for name in ("batch", "group"))
    algo, size, num = view["orchestrator.algo.type"], view[batch], view[group]
    if num < 2 and algo in ("grpo", "max_rl"):
        fix = "Write group_size = 4 or more under [orchestrator]"
        view.refuse(f"{algo} compares the rollouts of a group, so it needs 2 or more", fix, group)
    if size is not None and size % num:
        fix = f"Write a multiple: batch_size = {max(size // num, 1) * num}"
        view.refuse(f"groups of {num} do not divide a batch of {size}", fix, batch, group)


def _order(view: _View) -> None:
    """Pairs of keys of which the first may not exceed the second."""
    least, start, most = (f"orchestrator.concurrency.{name}_inflight" for name in ("min", "initial", "max"))
    gates = [path for path in view.resolved if path.rpartition(".")[0] == f"{CURRICULUM}.gates"]
    for low, high in (
        *((least, start), (least, most), (start, most)),
        *(("orchestrator.group_size", path) for path in (start, most)),  # a group is in flight as a whole
        ("trainer.scheduler.min_lr", "trainer.optim.lr"),
        ("inference.vllm.max_num_seqs", "inference.vllm.max_num_batched_tokens"),  # a token each, at least
        *((f"{gate}.reject_min", f"{gate}.reject_max") for gate in gates),
    ):
        if view[low] is not None and view[high] is not None and view[low] > view[high]:
            less, more = (path.rpartition(".")[2] for path in (low, high))
            cause = f"{less} {value_text(view[low])} exceeds {more} {value_text(view[high])}"
            view.refuse(cause, f"Lower {less} or raise {more}", low, high)


def _lengths(view: _View) -> None:
    path = "orchestrator.train.sampling.max_completion_tokens"
    if view[path] is not None and view[path] >= view["seq_len"]:
        cause = f"a completion of {view[path]} leaves no room for its prompt in seq_len {view['seq_len']}"
        view.refuse(cause, "Lower max_completion_tokens or raise seq_len", path, "seq_len")


def _scheduler(view: _View) -> None:
    selector, warmup_path, decay_path = (
        f"trainer.scheduler.{name}" for name in ("type", "warmup_steps", "decay_steps")
    )
    kind, steps = view[selector], view["max_steps"]
    if kind == "constant":
        return
    warmup, decay = view[warmup_path], view[decay_path] or 0
    if kind == "linear" and warmup == 0 and decay == 0:
        view.refuse("warmup_steps and decay_steps are both 0", 'Write type = "constant"', selector)
    if kind == "linear" and decay == 1:  # P/trainer/scheduler.py:49 decays over decay_steps - 1
        view.refuse("it would divide by zero at its start", "Write 0, or 2 or more", decay_path)
    if steps is None:
        if kind == "cosine" or decay > 0:
            fix = "Write max_steps at the top of the file" + ("" if kind == "cosine" else ", or decay_steps = 0")
            view.refuse("the decay ends at max_steps, which is not set", fix, selector)
    elif warmup >= steps:
        cause = f"a warm-up of {warmup} steps never ends within max_steps {steps}"
        view.refuse(cause, f"Write warmup_steps = {steps - 1} or less, or raise max_steps", warmup_path, "max_steps")
    elif warmup + decay > steps:
        cause = f"warmup_steps {warmup} + decay_steps {decay} exceed max_steps {steps}"
        view.refuse(cause, "Shorten one of them", decay_path, warmup_path, "max_steps")


def _optimizer(view: _View) -> None:
    if view["trainer.optim.nesterov"] and view["trainer.optim.momentum"] == 0:
        view.refuse("Nesterov needs some", "Write nesterov = false, or a momentum above 0", "trainer.optim.momentum")


def _memory(view: _View) -> None:
    """What the file leaves out the preset of memory makes fit."""
    ac, offload = "trainer.model.ac", "trainer.model.fsdp_cpu_offload"
    if view[ac] is None and view.values.get("trainer.model.ac_offloading") is not None:
        view.refuse("ac_offloading is on and would switch it on again", 'Write ac_offloading = "None" too', ac)
    if view[offload] and view.values.get("trainer.model.optim_cpu_offload"):
        view.refuse("optim_cpu_offload is on as well", "Write optim_cpu_offload = false", offload)
    if view[offload] and view["trainer.optim.type"] == "muon":
        view.refuse("the muon optimizer cannot go with it", "Write fsdp_cpu_offload = false", offload)


def _pools(view: _View) -> None:
    table = f"{CURRICULUM}.sampler.pools"
    pools = [path for path, value in view.resolved.items() if value == {} and path.rpartition(".")[0] == table]
    for pool in pools:
        for leaf in ("threshold", "weight"):
            if view[f"{pool}.{leaf}"] is None:
                view.refuse(f"the pool has no {leaf}", f"Write {leaf} under [{pool}]", pool)
    if len({view[f"{pool}.threshold"] for pool in pools}) != len(pools):
        view.refuse("two pools have the same threshold", "Give each its own", f"{pools[-1]}.threshold")
    if pools and not any(view[f"{pool}.weight"] for pool in pools):
        view.refuse("no pool has a weight above 0", "Give one pool a weight above 0", f"{pools[-1]}.weight")


_MAX_DEPTH = 12  # of the path in a message; prime-rl's deepest open key has 8 segments
ChangeKind = Literal["changed", "added", "removed"]
_FORMS: dict[ChangeKind, str] = {  # in the order in which they are shown
    "changed": r"(?P<key>[^\s+-]\S*) (?P<old>.*?) -> (?P<new>.*)",
    "added": r"\+(?P<key>\S+) (?P<new>.*?)(?: \(default (?P<old>.*)\))?",
    "removed": r"-(?P<key>\S+) (?P<old>.*?)(?: \(default (?P<new>.*)\))?",
}


@dataclass(frozen=True)
class Config:
    """A checked train.toml.

    `values` holds what the file says, dotted key to canonical value: numbers of float keys are floats,
    "None" is None, a table that switches something on is an (empty) dict, a list is a sorted tuple. `resolved`
    holds every open key that applies, defaults filled in. `hash` is the sha256 of what differs from
    prime-rl's defaults: comments, order, spelling of numbers and keys written with their default value
    do not change it (but difficulty pools spelled out as prime-rl's own three do, and the keys of BY_PRESET).
    """

    source: bytes
    values: Mapping[str, Value]
    resolved: Mapping[str, Value] = field(repr=False)
    hash: str

    def get(self, key: str) -> Any:
        """The value of an open key, prime-rl's default where the file is silent, None where it does not apply.

        Raises:
            KeyError: not an open key.
        """
        if key not in self.resolved and not variants(key):
            raise KeyError(key)
        return self.resolved.get(key)


def load(path: Path) -> Config:
    """Read and check train.toml. Raises ConfigError with the first problem."""
    return parse(read_source(path), path.name)


def parse(source: bytes, name: str = "train.toml") -> Config:
    """Check the bytes of a train.toml; `name` is what messages call it. Raises ConfigError."""
    text, tree = document(source, name)
    values: dict[str, Value] = {}
    try:
        _walk(tree, (), values)
        resolved = resolve(values)
        _check_variants(values, resolved)
        check(values, resolved)
    except Problem as problem:
        line = line_of(text, problem.path)
        where = name if line is None else f"{name}:{line}"
        raise ConfigError(f"{where}: {problem.cause}", problem.fix) from None
    canonical = {
        path: value
        for path, value in resolved.items()
        if (path in values if path in BY_PRESET else value != default(path, resolved))
    }
    digest = hashlib.sha256(json.dumps(canonical, sort_keys=True, allow_nan=False).encode()).hexdigest()
    return Config(source, MappingProxyType(values), MappingProxyType(resolved), digest)


def _problem(path: tuple[str, ...], value: Any, cause: str, fix: str) -> Problem:
    """`key = value` followed by the cause; hostile names and values are escaped and shortened."""
    names = (part if re.fullmatch(r"[A-Za-z0-9_-]+", part, re.ASCII) else quoted(part) for part in path)
    return Problem(f"{shorten('.'.join(names), 80)} = {value_text(value)} {cause}", fix, path)


def _walk(node: dict[str, Any], path: tuple[str, ...], values: dict[str, Value]) -> None:
    """Fill `values` from a parsed document, in file order. Raises Problem for what it may not hold."""
    for name, value in node.items():
        here = (*path, name)
        dotted = ".".join(here)
        is_known = is_name(name)  # a dot in quotes is no step down
        entries = variants(dotted) if is_known else ()
        if isinstance(value, dict) and entries and entries[0].kind is Kind.TABLE:
            values[dotted] = {}
            _walk(value, here, values)
        elif entries:
            try:
                values[dotted] = accept(replace(entries[0], leaf=name), value)
            except Problem as error:
                raise _problem(here, value, error.cause, error.fix) from None
        elif not is_known or not is_inner(dotted):
            raise _closed(here, value)
        elif isinstance(value, dict):
            _walk(value, here, values)
        else:
            raise _problem(here, value, "is not a table", f"Write [{dotted}] and its keys below it")


def _closed(path: tuple[str, ...], value: Any) -> Problem:
    while isinstance(value, dict) and value and len(path) < _MAX_DEPTH:  # name the key, not its table
        name, value = next(iter(value.items()))
        path = (*path, name)
    cause, fix = "is unknown", "Delete it; uv run run.py --keys lists every key"
    if (found := lock(path)) is not None:
        cause, fix = f"is locked by the {found.owner}: {found.reason}", "Delete it"
    elif (meant := nearest(".".join(path))) is not None:
        table, _, leaf = meant.rpartition(".")
        leaf = "a name of letters, digits, - and _" if leaf == ANY else leaf
        fix = f"Did you mean {meant}? Write {leaf} " + (f"under [{table}]" if table else "at the top of the file")
    return _problem(path, value, cause, fix)


def _check_variants(values: Mapping[str, Value], resolved: Mapping[str, Value]) -> None:
    """Raises Problem for a key of a variant that is not selected."""
    for path, value in values.items():
        conditions = [entry.only_if for entry in variants(path) if entry.only_if is not None]
        if path in resolved or not conditions:
            continue  # without conditions it is inside a table that does not apply, which comes first
        selector = conditions[0][0]
        wanted = [choice for _, choices in conditions for choice in choices]
        cause, fix = f"cannot stand beside {selector}", "Delete one of the two"
        if wanted != [None]:
            cause = f"has no effect with {selector} = {value_text(resolved.get(selector))}"
            leaf = selector.rpartition(".")[2]
            fix = f"Delete it, or write {leaf} = {' or '.join(map(value_text, wanted))}"
        raise _problem(tuple(path.split(".")), value, cause, fix)


@dataclass(frozen=True, slots=True)
class Change:
    """One key that trains otherwise: `changed` where both files write it, else `added` or `removed`.

    Where a file is silent, `old` or `new` is prime-rl's default; None where it has none.
    """

    key: str
    kind: ChangeKind
    old: str | None
    new: str | None

    @property
    def line(self) -> str:
        """As records hold it: `key old -> new`, `+key new (default old)` or `-key old (default new)`."""
        if self.kind == "changed":
            return f"{self.key} {self.old} -> {self.new}"
        sign, value, standard = ("+", self.new, self.old) if self.kind == "added" else ("-", self.old, self.new)
        return f"{sign}{self.key} {value}" + ("" if standard is None else f" (default {standard})")


def changes_of(lines: Iterable[str]) -> tuple[Change, ...]:
    """The changes that a record holds as lines; a line of another form is left out."""
    return tuple(
        Change(match["key"], kind, match["old"], match["new"])
        for line in lines
        for kind, form in _FORMS.items()  # each begins otherwise
        if (match := re.fullmatch(form, line[:MAX_LINE]))
    )


def changed_keys(old: Config, new: Config) -> list[str]:
    """The keys that either file writes and that train otherwise, in the order of the files, the new one first."""
    missing = object()

    def meant(config: Config, path: str) -> object:
        return (config.values if path in BY_PRESET else config.resolved).get(path, missing)

    paths = dict.fromkeys([*new.values, *old.values])
    return [path for path in paths if meant(old, path) != meant(new, path)]


def diff(old: Config, new: Config) -> tuple[Change, ...]:
    """Key-level changes, changed before added before removed; empty when both train the same."""
    found = []
    for path in changed_keys(old, new):
        before, after = (
            spelled(one.values[path]) if path in one.values else _default(path, other.resolved)
            for one, other in ((old, new), (new, old))
        )
        kind: ChangeKind = "removed" if path not in new.values else "changed" if path in old.values else "added"
        found.append(Change(path, kind, before, after))
    return tuple(sorted(found, key=lambda change: list(_FORMS).index(change.kind)))  # stable: in file order within


def spelled(value: Value) -> str:
    """A value in a difference: as in train.toml, but texts without quotes and a table as `on`."""
    if isinstance(value, dict):
        return "on"
    return "None" if value is None else value if isinstance(value, str) else value_text(value, 200)


def _default(path: str, resolved: Mapping[str, Value]) -> str | None:
    """prime-rl's default in words; None for an entry that the agent named."""
    if path in BY_PRESET:
        return "by preset"
    entry, value = variants(path)[0], default(path, resolved)
    if ANY in entry.path:
        return None
    if value is None:
        return "off" if entry.kind is Kind.TABLE else "unset"
    return spelled(value)
