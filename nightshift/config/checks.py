"""Check train.toml, and report all problems at once, each with the key, the offending value and the fix."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from nightshift.config.allowlist import (
    ANY,
    CURRICULUM,
    FOREIGN,
    LOSS,
    OTHER_VERSION,
    PARAMETERS,
    PRIME_RL_LOSSES,
    ROWS,
    Kind,
    Lock,
    Value,
    accept,
    find_key,
    find_part,
    find_renamed,
    is_accepted,
    is_inner,
    is_name,
    lock,
    spelled_out,
    suggest,
    tables_around,
    value_text,
    written,
)
from nightshift.errors import ConfigError

MAX_PROBLEMS = 50  # in one message
MAX_DEPTH = 12  # segments of a path in a problem; the deepest open key has 8
KeyPath = tuple[str, ...]


class Problem(NamedTuple):
    """One reason to refuse a train.toml.

    `path` and `value`: the key to report. `lock`: of a key that is not allowed in train.toml. `target`: the open key
    that another name stands for, with the same meaning and unit unless the target `is_guess`.
    """

    path: KeyPath
    value: Any
    cause: str
    fix: str
    lock: Lock | None = None
    target: str = ""
    is_guess: bool = False


def read_values(tree: Mapping[str, Any], most: int | None = None) -> tuple[dict[str, Value], list[Problem]]:
    """Return the values of the open keys in a config, and the problems of single keys; at most `most` problems."""
    values: dict[str, Value] = {}
    problems = {problem.cause: problem for problem in islice(_walk(tree, (), values), most)}
    return values, list(problems.values())


def _walk(node: Mapping[str, Any], path: KeyPath, values: dict[str, Value]) -> Iterator[Problem]:
    """Fill `values` from a table, in file order, and yield the problems."""
    for name, value in node.items():
        place = (*path, name)
        dotted = ".".join(place) if is_name(name) else ""  # a name in quotes may contain a dot
        key = find_key(dotted)
        is_table = key.kind is Kind.TABLE if key else is_inner(dotted)
        if is_table and isinstance(value, dict):
            if key is not None:
                values[dotted] = {}
            yield from _walk(value, place, values)
        elif key is not None:
            try:
                values[dotted] = accept(key, value, place)
            except ConfigError as error:
                yield Problem(place, value, error.cause, error.fix)
        elif is_table:
            fix = f"Write [{dotted}] once, in single brackets, and its keys below it"
            yield Problem(place, value, f"{spelled_out(place, value)} is not one table", fix)
            for table in tables_of(value):
                yield from _walk(table, place, values)
        else:
            yield from _not_open(place, value)


def tables_of(value: Any) -> list[dict[str, Any]]:
    """Return the tables of a [table] or of [[tables]]; [] for another value."""
    items = value if isinstance(value, list) else [value]
    return items if all(isinstance(item, dict) for item in items) else []


# -- a key that is not open ---------------------------------------------------------------------------


def _not_open(path: KeyPath, value: Any) -> Iterator[Problem]:
    """Yield the problems of a key, or of each key of a table, that is not open."""
    items = [item for table in tables_of(value) for item in table.items()]
    if not items or len(path) >= MAX_DEPTH:
        yield _problem(path, value)
        return
    for name, item in items:
        yield from _not_open((*path, name), item)


def _problem(path: KeyPath, value: Any) -> Problem:
    """Return the problem of a key that is not open."""
    spelled, owner = spelled_out(path, value), lock(path)
    key, origin = (find_part(path) if owner else find_renamed(path)) or (None, "")
    if key is not None and not origin:
        cause = f"{spelled} is not a key; the nearest is {key.path.replace(ANY, 'NAME')} ({key.meaning})"
        fix = "Delete it, or choose a new value for the nearest key, whose meaning or unit differs"
        return Problem(path, value, cause, fix)
    if key is not None:
        verb = "is now" if origin == OTHER_VERSION else f"is {origin}'s word for"
        allowed = "" if is_accepted(key, value) else f", which allows {key.allowed()}"
        return Problem(path, value, f"{spelled} {verb} {key.path}{allowed}", written(key, value), target=key.path)
    owner = owner or lock(path, FOREIGN)
    if owner is not None:
        verb = "has no counterpart" if owner.owner == "nobody" else f"is locked by the {owner.owner}"
        table = next((table for table in tables_around(path) if table in (*owner.paths, *owner.former)), "")
        delete = f"Delete [{table}]" if table else "Delete it"  # an empty [table] would be refused too
        fix = "; ".join(filter(None, (delete, owner.use)))
        return Problem(path, value, f"{spelled} {verb}: {owner.reason}", fix, owner)
    similar = suggest(path)
    fix = f"Did you mean {' or '.join(similar)}?" if similar else "Delete it; uv run run.py --keys lists every key"
    if len(similar) != 1:
        return Problem(path, value, f"{spelled} is unknown", fix)
    fix += f" {written(ROWS[similar[0]], value)}"
    return Problem(path, value, f"{spelled} is unknown", fix, target=similar[0], is_guess=True)


# -- rules between keys -------------------------------------------------------------------------------
# Only rules that the trl engine needs, or that prevent a change without an effect: prime-rl's own classes refuse more
# combinations of keys on the worker, before anything starts.

Resolved = Mapping[str, Any]


def rule_problems(values: Mapping[str, Value], resolved: Resolved, problems: Sequence[Problem] = ()) -> list[Problem]:
    """Return the broken rules between keys, except rules that involve a key of `problems`."""
    suspect = {path for problem in problems for path in (".".join(problem.path), problem.target)}
    new = []
    for cause, fix, *paths in _broken_rules(values, resolved):
        if not suspect.intersection(paths):
            path = next((path for path in paths if path in values), paths[0])
            value = resolved.get(path, values.get(path))
            text = f"{'on' if value == {} else value_text(value)}{'' if path in values else ' (the default)'}"
            new.append(Problem(tuple(path.split(".")), value, f"{path} = {text}{cause}", fix))
            suspect.add(path)
    return new


def _broken_rules(values: Mapping[str, Value], resolved: Resolved) -> Iterator[tuple[str, ...]]:
    """Yield the message after `key = value`, the fix, and the paths of the keys that the rule involves."""
    for path in values:
        key = find_key(path)
        selector, wanted = key.only_if if key is not None and key.only_if else ("", ())
        if selector and resolved.get(selector) not in wanted:
            fix = f"Delete it, or write {selector.rpartition('.')[2]} = {' or '.join(map(value_text, wanted))}"
            yield f" has no effect with {selector} = {value_text(resolved.get(selector))}", fix, path, selector
        if path.startswith(f"{PARAMETERS}.") and resolved[LOSS] in PRIME_RL_LOSSES:
            fix = "Delete it, or write the name of a loss that rules.toml offers"
            yield f" has no effect with {LOSS} = {value_text(resolved[LOSS])}", fix, path, LOSS
    batch_path, group_path, algo_path = "orchestrator.batch_size", "orchestrator.group_size", "orchestrator.algo.type"
    batch, group = resolved.get(batch_path), resolved[group_path]
    if group < 2 and resolved[algo_path] in ("grpo", "max_rl"):
        cause = f": {resolved[algo_path]} compares the rollouts of a group, so it needs 2 or more"
        yield cause, "Write group_size = 4 or more under [orchestrator]", group_path
    if batch is not None and batch % group:
        fix = f"Write another group_size, or a multiple: batch_size = {max(batch // group, 1) * group}"
        yield f": groups of {group} do not divide a batch of {batch}", fix, batch_path, group_path
    for low in resolved:
        key = find_key(low)
        for limit in key.at_most if key is not None else ():
            high = f"{low.rpartition('.')[0]}.{limit.rpartition('.')[2]}" if ANY in limit else limit
            if resolved[low] is not None and resolved.get(high) is not None and resolved[low] > resolved[high]:
                less, more = low.rpartition(".")[2], high.rpartition(".")[2]
                cause = f": {less} {value_text(resolved[low])} exceeds {more} {value_text(resolved[high])}"
                yield cause, f"Lower {less} or raise {more}", low, high
    length_path, row = "orchestrator.train.sampling.max_completion_tokens", resolved["seq_len"]
    if resolved[length_path] is not None and resolved[length_path] >= row:
        cause = f": a completion of {resolved[length_path]} leaves no room for its prompt in seq_len {row}"
        yield cause, "Lower max_completion_tokens or raise seq_len", length_path, "seq_len"
    schedule_path, warmup_path = "trainer.scheduler.type", "trainer.scheduler.warmup_steps"
    decay_path = "trainer.scheduler.decay_steps"
    warmup, decay, steps = resolved.get(warmup_path, 0), resolved.get(decay_path, 0), resolved["max_steps"]
    if steps is None and (resolved[schedule_path] == "cosine" or decay > 0):
        yield (
            ": the decay ends at max_steps, which is not set",
            "Write max_steps at the top of the file",
            schedule_path,
            "max_steps",
        )
    if steps is not None and warmup + max(decay, 1) > steps and resolved[schedule_path] != "constant":
        cause = f": warmup_steps {warmup} + decay_steps {decay} exceed max_steps {steps}"
        yield cause, "Shorten one of them, or raise max_steps", decay_path, warmup_path, schedule_path, "max_steps"
    ac, offloading = "trainer.model.ac", "trainer.model.ac_offloading"
    if resolved[ac] is None and values.get(offloading) is not None:  # the memory preset sets a key that is left out
        yield ": ac_offloading is on and would switch it on again", 'Write ac_offloading = "None" too', ac, offloading
    for pool in (path for path in resolved if path.rpartition(".")[0] == f"{CURRICULUM}.sampler.pools"):
        for leaf in ("threshold", "weight"):
            if resolved[f"{pool}.{leaf}"] is None:
                yield f": the pool has no {leaf}", f"Write {leaf} under [{pool}]", pool, f"{pool}.{leaf}"
