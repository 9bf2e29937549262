"""Check train.toml: every problem of a file in one answer, each with its key, the offending value and the fix."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from nightshift.config.allowlist import (
    ANY,
    CURRICULUM,
    FORMER,
    NAME_RULE,
    OTHER_VERSION,
    WORDS,
    Lock,
    find_key,
    find_renamed,
    is_inner,
    is_name,
    lock,
    lock_of_word,
    suggest,
    tables_around,
)
from nightshift.config.toml_text import MAX_DEPTH
from nightshift.config.values import Key, Kind, Value, accept, instead, is_accepted, spelled_out, value_text
from nightshift.errors import ConfigError

MAX_PROBLEMS = 200  # the check of a train.toml stops after one more
Path = tuple[str, ...]


class Problem(NamedTuple):
    """One reason to refuse a train.toml.

    `path` and `value`: the key to point at. `lock`: of a key that train.toml may not hold. `target`: the open key that
    another name means, with the same meaning and unit unless it `is_guess`.
    """

    path: Path
    value: Any
    cause: str
    fix: str
    lock: Lock | None = None
    target: str = ""
    is_guess: bool = False


def read_values(tree: Mapping[str, Any], most: int | None = None) -> tuple[dict[str, Value], list[Problem]]:
    """Return the values of the open keys in a config, and the problems of single keys.

    Another name of a key counts as the key. `most`: problems after which reading stops.
    """
    values: dict[str, Value] = {}
    by_path: dict[Path, Problem] = {}
    for problem in islice(_walk(tree, (), values), most):
        by_path.setdefault(problem.path, problem)
    return values, list(by_path.values())


def rule_problems(
    values: Mapping[str, Value], resolved: Mapping[str, Value], problems: Sequence[Problem] = ()
) -> list[Problem]:
    """Return the broken rules between keys, except those about a key that has one of `problems` already."""
    suspect = {".".join(problem.path) for problem in problems}
    suspect |= {problem.target for problem in problems if problem.target not in values}
    written_as = {problem.target: problem.path for problem in problems}
    new = []
    for cause, fix, *paths in _broken_rules(values, resolved):
        if not suspect.intersection(paths):
            path = next((path for path in paths if path in values), paths[0])
            new.append(Problem(written_as.get(path, tuple(path.split("."))), resolved.get(path), cause, fix))
            suspect.add(path)
    return new


def _walk(node: Mapping[str, Any], path: Path, values: dict[str, Value]) -> Iterator[Problem]:
    """Fill `values` from a table, in file order, and yield the problems."""
    for name, value in node.items():
        here = (*path, name)
        dotted = ".".join(here)
        key = find_key(dotted) if is_name(name) else None  # a dot in quotes is no step into a table
        tables = tables_of(value)
        if key is not None and key.kind is Kind.TABLE and isinstance(value, dict):
            values[dotted] = {}
            yield from _walk(value, here, values)
        elif key is not None:
            try:
                values[dotted] = accept(key, value, here)
            except ConfigError as error:
                yield Problem(here, value, error.cause, error.fix)
        elif not is_name(name) or not is_inner(dotted):
            was_table = any(word.startswith(f"{dotted}.") for word in FORMER)  # of open keys, in another version
            if value != {} or not was_table or lock(here):
                yield from _not_open(here, value, values)
        elif not tables:
            cause = f"{spelled_out(here, value)} is not a table"
            yield Problem(here, value, cause, f"Write [{dotted}] and its keys below it")
        else:
            names = [f"{dotted}.{name}" for table in tables for name in table]
            if not isinstance(value, dict) and (not names or any(is_inner(name) or find_key(name) for name in names)):
                cause = f"[[{dotted}]] is a list of tables"
                yield Problem(here, value, cause, f"Write [{dotted}] once, in single brackets")
            for table in tables:
                yield from _walk(table, here, values)


def tables_of(value: Any) -> list[dict[str, Any]]:
    """Return the tables of a [table] or of [[tables]]; empty for another value."""
    items = value if isinstance(value, list) else [value]
    return items if all(isinstance(item, dict) for item in items) else []


# -- a key that is not open ---------------------------------------------------------------------------


def _not_open(path: Path, value: Any, values: dict[str, Value]) -> Iterator[Problem]:
    """Yield the problems of a key or table that is not open: one for a table with one owner, else one for each key."""
    items = [item for table in tables_of(value) for item in table.items()]
    if lock(path) is not None or not items or len(path) >= MAX_DEPTH:
        yield _problem(path, value, values)
        return
    rest = []
    for name, item in items:
        if ".".join((*path, name)) in WORDS:
            yield _problem((*path, name), item, values)
        else:
            rest.append((name, item))
    if len(rest) > 1 and (lock_of_word(path) or find_renamed(path)):
        yield _problem(path, value, values)
    else:
        for name, item in rest:
            yield from _not_open((*path, name), item, values)


def _problem(path: Path, value: Any, values: dict[str, Value]) -> Problem:
    """Return the problem of a key that is not open. If the key means an open key, `values` gets the value."""
    while isinstance(value, dict) and len(value) == 1 and len(path) < MAX_DEPTH:  # name the key, not its table
        name, value = next(iter(value.items()))
        path = (*path, name)
    spelled = spelled_out(path, value)
    owner = lock(path)
    renamed = None if owner else find_renamed(path)
    if renamed is not None and not renamed.origin:
        key = renamed.key
        cause = f"{spelled} is not a key; the nearest is {key.path.replace(ANY, 'NAME')} ({key.meaning})"
        fix = "Delete it, or choose a new value for the nearest key: meaning or unit differ"
        return Problem(path, value, cause, fix)
    if renamed is not None:
        key = renamed.key
        verb = "is now" if renamed.origin == OTHER_VERSION else f"is {renamed.origin}'s word for"
        allowed = "" if is_accepted(key, value) else f", which allows {key.allowed()}"
        _take_over(key, value, values)
        cause = f"{spelled} {verb} {key.path}{allowed}"
        return Problem(path, value, cause, f"Write {_line(key, value)}", target=key.path)
    table = ".".join(path[:-1])
    if find_key(f"{table}.{ANY}") is not None:
        fix = f"Write a name under [{table}] that {NAME_RULE}"
        return Problem(path, value, f"{spelled} is unknown", fix)
    owner = owner or lock_of_word(path)
    if owner is not None:
        verb = "has no counterpart" if owner.owner == "nobody" else f"is locked by the {owner.owner}"
        table = next((table for table in tables_around(path) if table in (*owner.paths, *owner.former)), "")
        fix = f"Delete [{table}]" if table else "Delete it"  # an empty [table] would be refused too
        fix += f"; {owner.use}" if owner.use else ""
        return Problem(path, value, f"{spelled} {verb}: {owner.reason}", fix, owner)
    similar = suggest(path)
    fix = f"Did you mean {' or '.join(similar)}?" if similar else "Delete it; uv run run.py --keys lists every key"
    suggested = find_key(similar[0]) if len(similar) == 1 else None
    if suggested is None:
        return Problem(path, value, f"{spelled} is unknown", fix)
    _take_over(suggested, value, values)
    fix += f" Write {_line(suggested, value)}"
    return Problem(path, value, f"{spelled} is unknown", fix, target=suggested.path, is_guess=True)


def _take_over(key: Key, value: Any, values: dict[str, Value]) -> None:
    """Count the value as the key's, and switch on the tables around the key."""
    if key.kind is Kind.TABLE and isinstance(value, bool):  # old formats switch a table on with true
        value = {} if value else "None"
    if ANY in key.path or not is_accepted(key, value):
        return
    for table in tables_around(key.path.split(".")):
        if find_key(table) is not None:
            values.setdefault(table, {})
    values.setdefault(key.path, accept(key, value))


def _line(key: Key, value: Any) -> str:
    """Return the line to write, as in `lr = 3e-6 under [trainer.optim]`."""
    if key.kind is Kind.TABLE:
        return f"[{key.path.replace(ANY, 'NAME')}]"
    value = value if is_accepted(key, value) else instead(key, value)
    where = f"under [{key.table}]" if key.table else "at the top of the file"
    return f"{key.leaf.replace(ANY, 'NAME')} = {value_text(value)} {where}"


# -- rules between keys -------------------------------------------------------------------------------

Broken = tuple[str, ...]  # the cause, the fix, and the paths that the rule involves


def _broken_rules(values: Mapping[str, Value], resolved: Mapping[str, Any]) -> Iterator[Broken]:
    """Yield the broken rules between keys: prime-rl's own for open keys, and rules that prevent a wasted run."""

    def broken(cause: str, fix: str, *paths: str) -> Broken:
        path = next((path for path in paths if path in values), paths[0])
        note = "" if path in values else " (the default)"
        text = "on" if resolved.get(path) == {} else value_text(resolved.get(path))
        return f"{path} = {text}{note}: {cause}", fix, *paths

    for path, value in values.items():
        key = find_key(path)
        selector, wanted = key.only_if if key is not None and key.only_if else ("", ())
        if selector and resolved.get(selector) not in wanted:  # the key belongs to another variant
            name, leaf = selector.rpartition(".")[2], path.rpartition(".")[2]
            fix = f"Delete it, or write {name} = {' or '.join(map(value_text, wanted))}"
            fix = f"Delete one of the two: {leaf} or {name}" if wanted == (None,) else fix
            cause = f"{spelled_out(tuple(path.split('.')), value)} has no effect with {selector}"
            yield f"{cause} = {value_text(resolved.get(selector))}", fix, path, selector

    batch_path, group_path = "orchestrator.batch_size", "orchestrator.group_size"
    algo, batch, group = resolved["orchestrator.algo.type"], resolved.get(batch_path), resolved[group_path]
    if group < 2 and algo in ("grpo", "max_rl"):
        cause = f"{algo} compares the rollouts of a group, so it needs 2 or more"
        yield broken(cause, "Write group_size = 4 or more under [orchestrator]", group_path)
    if batch is not None and batch % group:
        fix = f"Write a multiple: batch_size = {max(batch // group, 1) * group}"
        yield broken(f"groups of {group} do not divide a batch of {batch}", fix, batch_path, group_path)

    for low in resolved:
        key = find_key(low)
        for limit in key.at_most if key is not None else ():
            high = f"{low.rpartition('.')[0]}.{limit.rpartition('.')[2]}" if ANY in limit else limit
            if resolved[low] is not None and resolved.get(high) is not None and resolved[low] > resolved[high]:
                less, more = low.rpartition(".")[2], high.rpartition(".")[2]
                cause = f"{less} {value_text(resolved[low])} exceeds {more} {value_text(resolved[high])}"
                yield broken(cause, f"Lower {less} or raise {more}", low, high)

    length_path, row = "orchestrator.train.sampling.max_completion_tokens", resolved["seq_len"]
    if resolved[length_path] is not None and resolved[length_path] >= row:
        cause = f"a completion of {resolved[length_path]} leaves no room for its prompt in seq_len {row}"
        yield broken(cause, "Lower max_completion_tokens or raise seq_len", length_path, "seq_len")

    type_path, warmup_path, decay_path = (
        f"trainer.scheduler.{leaf}" for leaf in ("type", "warmup_steps", "decay_steps")
    )
    schedule, steps = resolved[type_path], resolved["max_steps"]
    warmup, decay = resolved.get(warmup_path) or 0, resolved.get(decay_path) or 0
    if schedule == "linear" and warmup == 0 and decay == 0:
        cause = "warmup_steps and decay_steps are both 0"
        yield broken(cause, 'Write type = "constant"', type_path, warmup_path, decay_path)
    if schedule == "linear" and decay == 1:  # prime-rl decays over decay_steps - 1 steps
        yield broken("it would divide by zero at its start", "Write 0, or 2 or more", decay_path)
    if steps is None and (schedule == "cosine" or decay > 0):
        fix = "Write max_steps at the top of the file" + (", or decay_steps = 0" if schedule == "linear" else "")
        yield broken("the decay ends at max_steps, which is not set", fix, type_path, "max_steps")
    if steps is not None and schedule != "constant" and warmup >= steps:
        cause = f"a warm-up of {warmup} steps never ends within max_steps {steps}"
        yield broken(cause, f"Write warmup_steps = {steps - 1} or less, or raise max_steps", warmup_path, "max_steps")
    elif steps is not None and warmup + decay > steps:
        cause = f"warmup_steps {warmup} + decay_steps {decay} exceed max_steps {steps}"
        yield broken(cause, "Shorten one of them", decay_path, warmup_path, "max_steps")

    if resolved.get("trainer.optim.nesterov") and resolved["trainer.optim.momentum"] == 0:
        fix = "Write nesterov = false, or a momentum above 0"
        yield broken("Nesterov needs some", fix, "trainer.optim.momentum", "trainer.optim.nesterov")

    # Only keys of the file count: the memory preset makes the other keys fit.
    ac, ac_offload, fsdp_offload, optim_offload = (
        f"trainer.model.{leaf}" for leaf in ("ac", "ac_offloading", "fsdp_cpu_offload", "optim_cpu_offload")
    )
    if resolved[ac] is None and values.get(ac_offload) is not None:
        fix = 'Write ac_offloading = "None" too'
        yield broken("ac_offloading is on and would switch it on again", fix, ac, ac_offload)
    if resolved[fsdp_offload] and values.get(optim_offload):
        yield broken("optim_cpu_offload is on as well", "Write optim_cpu_offload = false", fsdp_offload, optim_offload)
    if resolved[fsdp_offload] and resolved["trainer.optim.type"] == "muon":
        fix = "Write fsdp_cpu_offload = false"
        yield broken("the muon optimizer cannot go with it", fix, fsdp_offload, "trainer.optim.type")

    table = f"{CURRICULUM}.sampler.pools"
    pools = [path for path, value in resolved.items() if value == {} and path.rpartition(".")[0] == table]
    thresholds, weights = ([resolved[f"{pool}.{leaf}"] for pool in pools] for leaf in ("threshold", "weight"))
    for pool, leaf in ((pool, leaf) for pool in pools for leaf in ("threshold", "weight")):
        if resolved[f"{pool}.{leaf}"] is None:
            yield broken(f"the pool has no {leaf}", f"Write {leaf} under [{pool}]", pool, f"{pool}.{leaf}")
    if None not in thresholds and len({*thresholds}) < len(thresholds):
        yield broken("two pools have the same threshold", "Give each its own", f"{pools[-1]}.threshold")
    if pools and None not in weights and not any(weights):
        yield broken("no pool has a weight above 0", "Give one pool a weight above 0", f"{pools[-1]}.weight")
