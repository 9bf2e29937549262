"""`nightshift export --to rl.toml`: the incumbent's train.toml as a config that prime-rl itself runs.

The settings outside train.toml (model, environments, deployment) come from imported.toml, if prime-rl of today has
them.
"""

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nightshift.config.allowlist import CURRICULUM, OPPONENT, RATIO, SOURCE, find_key, find_renamed, is_inner, lock
from nightshift.config.checks import tables_of
from nightshift.config.import_config import IMPORTED_NAME, MAX_INFLIGHT, at, environment_name, is_of_today, model_name
from nightshift.config.rules import Rules
from nightshift.config.toml_text import document
from nightshift.config.train_toml import Config
from nightshift.config.values import Value
from nightshift.engines.prime_rl.config import most_inflight
from nightshift.errors import UsageError
from nightshift.files import nesting_limit, read_file
from nightshift.report.data import baseline_and_incumbent
from nightshift.report.export.story import Story
from nightshift.text import clean

_ALGO = "orchestrator.algo"
_INITIAL_INFLIGHT = "orchestrator.concurrency.initial_inflight"


def as_rl_toml(story: Story, number: int | None, root: Path) -> bytes:
    """Return the config of an experiment, of the incumbent if `number` is None, with the rest of imported.toml.

    Raises:
        UsageError: the campaign has no such experiment, or imported.toml cannot be read.
    """
    configs = baseline_and_incumbent(story.ledger, story.shown.campaign)
    config = story.configs.get(number) if number is not None else configs and configs[1]
    if config is None:
        which = "incumbent" if number is None else f"readable train.toml of experiment {number:04d}"
        raise UsageError(f"the campaign has no {which}", "Run its baseline, or name another --experiment.")
    records = sorted(story.shown.records, key=lambda record: record.number == number)  # its own rules, else the last
    rules = next((rules for record in reversed(records) if (rules := story.rules(record))), None)
    path = root / IMPORTED_NAME
    try:
        imported = read_file(path) if path.exists() else b""
    except OSError as error:
        cause = f"{path} cannot be read: {error.strerror or error}"
        raise UsageError(cause, "Put the file back, or delete it.") from None
    return rl_toml(config, imported, rules)


def rl_toml(config: Config, imported: bytes, rules: Rules | None = None) -> bytes:
    """Return a config of prime-rl with the values of `config`; it names the model of `rules` if `imported` names none.

    UsageError: `imported` has a value that the config cannot hold.
    """
    import tomlkit

    _, source = document(imported, IMPORTED_NAME)
    left_out: list[str] = []
    if is_of_today(source):
        tree = _kept(source, (), left_out)
        algo = tree.get("orchestrator", {}).get("algo", {})
        if algo and at(source, f"{_ALGO}.type") not in (None, config.get(f"{_ALGO}.type")):
            left_out += [f"{_ALGO}.{name}, of another algorithm" for name in algo]
            del tree["orchestrator"]["algo"]
    else:
        name = model_name(source) or (rules.model if rules else "")
        tree = {"model": {"name": name}} if name else {}
        left_out += [f"all of {IMPORTED_NAME} but its model: it has names of another version"] if source else []
    values: dict[str, Value] = dict(config.values)
    if config.get(MAX_INFLIGHT) is None:  # Nightshift's default, not prime-rl's
        values[MAX_INFLIGHT] = most = most_inflight(config.resolved)
        if isinstance(initial := config.get(_INITIAL_INFLIGHT), int):
            values[_INITIAL_INFLIGHT] = min(initial, most)
    sources = tables_of(at(tree, SOURCE) or [])
    for path, value in values.items():
        table, _, leaf = path.rpartition(".")
        if table == RATIO:
            named = [entry for entry in sources if environment_name(entry) == leaf]
            for entry in named:
                entry["ratio"] = value
            left_out += [] if named else [path]
        elif path.startswith(f"{CURRICULUM}."):
            for entry in sources:
                _set(entry, path.removeprefix(f"{SOURCE}."), value)
            left_out += [] if sources else [path]
        elif table == OPPONENT:
            left_out.append(path)
        else:
            _set(tree, path, value)
    rest = f"; the rest is from {IMPORTED_NAME}" if imported else ""
    head = [f"The config of a Nightshift campaign for prime-rl{rest}"]
    if rules is not None:
        head.append(f"measured with model {rules.model}, environments {', '.join(rules.environment_names)}")
        if rules.learning_rate_scale != 1:
            head.append(f"learning rates were multiplied by {rules.learning_rate_scale:g}")
    head += [f"left out: {path}" for path in left_out]
    is_same = False
    with suppress(ValueError), nesting_limit():
        text = "\n".join([*(f"# {clean(line)}" for line in head), "", tomlkit.dumps(_ordered(tree))])
        is_same = tomllib.loads(text) == _ordered(tree)
    if not is_same:
        cause = f"{IMPORTED_NAME} has a value that cannot be written: nan, or a table of hundreds of levels"
        raise UsageError(cause, "Delete the value.")
    return text.encode()


def _kept(node: Mapping[str, Any], path: tuple[str, ...], left_out: list[str]) -> dict[str, Any]:
    """Return the keys that prime-rl of today has and train.toml does not hold. `left_out` gets the unknown keys."""
    kept: dict[str, Any] = {}
    for name, value in node.items():
        here = (*path, name)
        dotted = ".".join(here)
        if lock(here) is not None:
            kept[name] = value
        elif find_key(dotted) or find_renamed(here):
            continue
        elif isinstance(value, dict) and (value or is_inner(dotted)):
            below = _kept(value, here, left_out)
            if below or not value:
                kept[name] = below
        elif dotted == SOURCE and isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
            kept[name] = [_kept(entry, here, left_out) for entry in value]
        else:
            left_out.append(ascii(dotted)[1:-1])
    return kept


def _set(tree: dict[str, Any], path: str, value: Value) -> None:
    *tables, leaf = path.split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
    if value == {}:
        tree.setdefault(leaf, {})
    else:
        tree[leaf] = "None" if value is None else list(value) if isinstance(value, tuple) else value


def _ordered(node: Any) -> Any:
    """Return the same tables with single values before tables, as TOML needs them."""
    if isinstance(node, list):
        return [_ordered(item) for item in node]
    if not isinstance(node, dict):
        return node
    items = sorted(node.items(), key=lambda item: isinstance(item[1], dict) or _is_tables(item[1]))
    return {name: _ordered(value) for name, value in items}


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
