"""Check train.toml, and report all problems at once, each with the key, the offending value and the fix."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from nightshift.config.allowlist import (
    ANY,
    CURRICULUM,
    FORMER,
    LOSS,
    NAME_RULE,
    OTHER_VERSION,
    PARAMETERS,
    PRIME_RL_LOSSES,
    Key,
    Kind,
    Lock,
    Value,
    accept,
    find_key,
    find_part,
    find_renamed,
    instead,
    is_accepted,
    is_inner,
    is_name,
    lock,
    lock_of_word,
    spelled_out,
    suggest,
    tables_around,
    value_text,
)
from nightshift.errors import ConfigError

MAX_PROBLEMS = 50  # in one message
MAX_DEPTH = 12  # segments of a path in a problem; the deepest open key has 8
Path = tuple[str, ...]


class Problem(NamedTuple):
    """One reason to refuse a train.toml.

    `path` and `value`: the key to report. `lock`: of a key that is not allowed in train.toml. `target`: the open key
    that another name stands for, with the same meaning and unit unless the target `is_guess`.
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

    Another name of a key counts as the key. `most`: stop after so many problems.
    """
    values: dict[str, Value] = {}
    by_path: dict[Path, Problem] = {}
    for problem in islice(_walk(tree, (), values), most):
        by_path.setdefault(problem.path, problem)
    return values, list(by_path.values())


def _walk(node: Mapping[str, Any], path: Path, values: dict[str, Value]) -> Iterator[Problem]:
    """Fill `values` from a table, in file order, and yield the problems."""
    for name, value in node.items():
        place = (*path, name)
        dotted = ".".join(place)
        key = find_key(dotted) if is_name(name) else None  # a name in quotes may contain a dot
        if isinstance(value, dict) and is_name(name) and (key.kind is Kind.TABLE if key else is_inner(dotted)):
            if key is not None:
                values[dotted] = {}
            yield from _walk(value, place, values)
        elif key is not None:
            try:
                values[dotted] = accept(key, value, place)
            except ConfigError as error:
                yield Problem(place, value, error.cause, error.fix)
        elif is_name(name) and is_inner(dotted):
            yield from _no_table(place, value, values)
        elif value != {} or lock(place) or not any(word.startswith(f"{dotted}.") for word in FORMER):
            yield from _not_open(place, value, values)  # an empty table of another version is ignored


def tables_of(value: Any) -> list[dict[str, Any]]:
    """Return the tables of a [table] or of [[tables]]; [] for another value."""
    items = value if isinstance(value, list) else [value]
    return items if all(isinstance(item, dict) for item in items) else []


# -- a key that is not open ---------------------------------------------------------------------------


def _no_table(path: Path, value: Any, values: dict[str, Value]) -> Iterator[Problem]:
    """Yield the problems of a value, or of a list of tables, in place of a table of open keys."""
    dotted, tables = ".".join(path), tables_of(value)
    if not tables and value != []:
        cause = f"{spelled_out(path, value)} is not a table"
        yield Problem(path, value, cause, f"Write [{dotted}] and its keys below it")
        return
    names = [f"{dotted}.{name}" for table in tables for name in table]
    if not names or any(is_inner(name) or find_key(name) for name in names):
        cause = f"[[{dotted}]] is a list of tables"
        yield Problem(path, value, cause, f"Write [{dotted}] once, in single brackets")
    for table in tables:
        yield from _walk(table, path, values)


def _not_open(path: Path, value: Any, values: dict[str, Value]) -> Iterator[Problem]:
    """Yield the problems of a key or table that is not open.

    Each key that stands for an open key has its own problem. The other keys of a locked table share one problem.
    """
    items = [item for table in tables_of(value) for item in table.items()]
    if not items or len(path) >= MAX_DEPTH:
        yield _problem(path, value, values)
        return
    below = (problem for name, item in items for problem in _not_open((*path, name), item, values))
    if lock(path) is None and lock_of_word(path) is None:
        yield from below
        return
    problems = list(below)
    yield from (problem for problem in problems if problem.target)
    others = [problem for problem in problems if not problem.target]
    yield from others if len(others) == 1 else [_problem(path, value, values)] if others else []


def _problem(path: Path, value: Any, values: dict[str, Value]) -> Problem:
    """Return the problem of a key that is not open. If the key stands for an open key, add its value to `values`."""
    while isinstance(value, dict) and len(value) == 1 and len(path) < MAX_DEPTH:  # report the key, not its table
        name, value = next(iter(value.items()))
        path = (*path, name)
    spelled, table, owner = spelled_out(path, value), ".".join(path[:-1]), lock(path)
    renamed = find_part(path) if owner else find_renamed(path)
    if renamed is not None and not renamed.origin:
        key = renamed.key
        cause = f"{spelled} is not a key; the nearest is {key.path.replace(ANY, 'NAME')} ({key.meaning})"
        fix = "Delete it, or choose a new value for the nearest key, whose meaning or unit differs"
        return Problem(path, value, cause, fix)
    if renamed is not None:
        key = renamed.key
        verb = "is now" if renamed.origin == OTHER_VERSION else f"is {renamed.origin}'s word for"
        allowed = "" if is_accepted(key, value) else f", which allows {key.allowed()}"
        cause = f"{spelled} {verb} {key.path}{allowed}"
        return Problem(path, value, cause, _take_over(key, value, values), target=key.path)
    if find_key(f"{table}.{ANY}") is not None:
        return Problem(path, value, f"{spelled} is unknown", f"Write a name under [{table}] that {NAME_RULE}")
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
    fix += f" {_take_over(suggested, value, values)}"
    return Problem(path, value, f"{spelled} is unknown", fix, target=suggested.path, is_guess=True)


def _take_over(key: Key, value: Any, values: dict[str, Value]) -> str:
    """Add the value to `values` as the key's, switch on the tables around the key, and return the fix."""
    written = value if is_accepted(key, value) else instead(key, value)
    if key.kind is Kind.TABLE and isinstance(value, bool):  # old formats switch a table on with true
        value = {} if value else "None"
    if ANY not in key.path and is_accepted(key, value):
        for table in tables_around(key.path.split(".")):
            if find_key(table) is not None:
                values.setdefault(table, {})
        values.setdefault(key.path, accept(key, value))
    if key.kind is Kind.TABLE:
        return f"Write [{key.path.replace(ANY, 'NAME')}]"
    where = f"under [{key.table}]" if key.table else "at the top of the file"
    return f"Write {key.leaf.replace(ANY, 'NAME')} = {value_text(written)} {where}"


# -- rules between keys -------------------------------------------------------------------------------
# Only rules that the trl engine needs, or that prevent a change without an effect: prime-rl's own classes refuse more
# combinations of keys on the worker, before anything starts.

Broken = tuple[str, ...]  # the message after `key = value`, the fix, and the paths of the keys that the rule involves
Resolved = Mapping[str, Any]
_SCHEDULE = "trainer.scheduler.type"
_POOLS = f"{CURRICULUM}.sampler.pools"


def rule_problems(values: Mapping[str, Value], resolved: Resolved, problems: Sequence[Problem] = ()) -> list[Problem]:
    """Return the broken rules between keys, except rules that involve a key of `problems`."""
    suspect = {".".join(problem.path) for problem in problems}
    suspect |= {problem.target for problem in problems if problem.target not in values}
    written_as = {problem.target: problem.path for problem in problems}
    new = []
    for cause, fix, *paths in _broken_rules(values, resolved):
        if not suspect.intersection(paths):
            path = next((path for path in paths if path in values), paths[0])
            value = values[path] if path in values else resolved.get(path)
            text = f"{'on' if value == {} else value_text(value)}{'' if path in values else ' (the default)'}"
            new.append(Problem(written_as.get(path, tuple(path.split("."))), value, f"{path} = {text}{cause}", fix))
            suspect.add(path)
    return new


def _broken_rules(values: Mapping[str, Value], resolved: Resolved) -> Iterator[Broken]:
    for path in values:
        key = find_key(path)
        selector, wanted = key.only_if if key is not None and key.only_if else ("", ())
        if selector and resolved.get(selector) not in wanted:
            name, leaf = selector.rpartition(".")[2], path.rpartition(".")[2]
            fix = f"Delete it, or write {name} = {' or '.join(map(value_text, wanted))}"
            fix = f"Delete one of the two: {leaf} or {name}" if wanted == (None,) else fix
            yield f" has no effect with {selector} = {value_text(resolved.get(selector))}", fix, path, selector
        if path.startswith(f"{PARAMETERS}.") and resolved[LOSS] in PRIME_RL_LOSSES:
            fix = "Delete it, or write the name of a loss that rules.toml offers"
            yield f" has no effect with {LOSS} = {value_text(resolved[LOSS])}", fix, path, LOSS
    batch_path, group_path = "orchestrator.batch_size", "orchestrator.group_size"
    algo, batch, group = resolved["orchestrator.algo.type"], resolved.get(batch_path), resolved[group_path]
    if group < 2 and algo in ("grpo", "max_rl"):
        cause = f": {algo} compares the rollouts of a group, so it needs 2 or more"
        yield cause, "Write group_size = 4 or more under [orchestrator]", group_path
    if batch is not None and batch % group:
        fix = f"Write a multiple: batch_size = {max(batch // group, 1) * group}"
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
    if resolved[_SCHEDULE] != "constant":
        yield from _schedule_rules(resolved)
    if any(path.startswith(_POOLS) for path in values):
        yield from _pool_rules(resolved)
    if resolved.get("trainer.optim.nesterov") and resolved.get("trainer.optim.momentum") == 0:
        fix = "Write nesterov = false, or a momentum above 0"
        yield ": Nesterov needs a momentum above 0", fix, "trainer.optim.momentum", "trainer.optim.nesterov"
    ac, offloading = "trainer.model.ac", "trainer.model.ac_offloading"
    if resolved[ac] is None and values.get(offloading) is not None:  # the memory preset sets a key that is left out
        fix = 'Write ac_offloading = "None" too'
        yield ": ac_offloading is on and would switch it on again", fix, ac, offloading


def _schedule_rules(resolved: Resolved) -> Iterator[Broken]:
    warmup_path, decay_path = "trainer.scheduler.warmup_steps", "trainer.scheduler.decay_steps"
    schedule, steps = resolved[_SCHEDULE], resolved["max_steps"]
    warmup, decay = resolved[warmup_path], resolved.get(decay_path, 0)
    if schedule == "linear" and warmup == decay == 0:
        cause = ": warmup_steps and decay_steps are both 0"
        yield cause, 'Write type = "constant"', _SCHEDULE, warmup_path, decay_path
    if decay == 1:  # prime-rl divides by decay_steps - 1
        yield ": the schedule would divide by zero", "Write 0, or 2 or more", decay_path
    if steps is None and (schedule == "cosine" or decay > 0):
        fix = "Write max_steps at the top of the file" + (", or decay_steps = 0" if schedule == "linear" else "")
        yield ": the decay ends at max_steps, which is not set", fix, _SCHEDULE, "max_steps"
    if steps is not None and warmup >= steps:
        cause = f": a warm-up of {warmup} steps never ends within max_steps {steps}"
        yield cause, f"Write warmup_steps = {steps - 1} or less, or raise max_steps", warmup_path, "max_steps"
    elif steps is not None and warmup + decay > steps:
        cause = f": warmup_steps {warmup} + decay_steps {decay} exceed max_steps {steps}"
        yield cause, "Shorten one of them", decay_path, warmup_path, "max_steps"


def _pool_rules(resolved: Resolved) -> Iterator[Broken]:
    pools = [path for path, value in resolved.items() if value == {} and path.rpartition(".")[0] == _POOLS]
    thresholds, weights = ([resolved[f"{pool}.{leaf}"] for pool in pools] for leaf in ("threshold", "weight"))
    for pool, leaf in ((pool, leaf) for pool in pools for leaf in ("threshold", "weight")):
        if resolved[f"{pool}.{leaf}"] is None:
            yield f": the pool has no {leaf}", f"Write {leaf} under [{pool}]", pool, f"{pool}.{leaf}"
    if None not in thresholds and len({*thresholds}) < len(thresholds):
        yield ": two pools have the same threshold", "Give each pool its own threshold", f"{pools[-1]}.threshold"
    if pools and None not in weights and not any(weights):
        yield ": no pool has a weight above 0", "Give one pool a weight above 0", f"{pools[-1]}.weight"
