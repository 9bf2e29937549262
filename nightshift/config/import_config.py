"""Translate a config of another format into a train.toml, and report what happened to each key.

Research keys are translated. Values of keys with another meaning or unit, or with a similar name only, are never
copied. The report lists every other key with its owner.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nightshift.config.allowlist import (
    ANY,
    CARRIED,
    DIALECTS,
    FORMER,
    IMPORT_PATH,
    KEYS,
    LOSS,
    OTHER_VERSION,
    PRIME_RL,
    RATIO,
    ROWS,
    Dialect,
    Value,
    accept,
    default_text,
    find_key,
    find_renamed,
    is_accepted,
    is_inner,
    is_name,
    quoted,
    resolve,
    shorten,
    spelled_out,
    tables_around,
    value_text,
)
from nightshift.config.checks import Problem, read_values, rule_problems, tables_of
from nightshift.config.losses import loss_problems
from nightshift.config.rules import RULES_NAME, LossRules
from nightshift.config.rules_toml import REVISIONS, chosen_in, rules_of
from nightshift.config.train_toml import MAX_LINE, document, parse, read_source
from nightshift.errors import ConfigError, UsageError, listed
from nightshift.text import clean

IMPORTED_NAME = "imported.toml"
GROUP_SIZE, BATCH_SIZE = "orchestrator.group_size", "orchestrator.batch_size"
_PARTS = {"trainer", "orchestrator", "inference"}  # tables of prime-rl that may have a file of their own
_NOT_RL = ("data.name", "data.type", "eval.client.base_url", "vllm.model")  # keys of other programs of prime-rl
_SECRET = re.compile(
    r"(?is)(?!.*[-_](env|file|name|path|var)$|(bos|eos|pad|unk)_token$)"  # no secrets
    r".*((api|access|private)[-_]?key|token$|secret|password|authorization)"
)
# prime-rl's pull requests 3418 of 27 August and 3586 of 18 September 2026.
_NEW_LOSS = (
    'trainer.loss.type is not set: "default" is trained here. In prime-rl since 27 August 2026 the default is "ipo" '
    "(since 18 September with ipo_threshold = 0.3 and kl_tau = 0). Set the key for a config of such a version"
)
_TITLES = {
    "rules": "left out, fixed by rules.toml for a whole campaign:",
    "harness": "left out, set by the harness or by a flag of run.py:",
    "nobody": "left out, without a counterpart in the pinned prime-rl:",
    "": "left out, not allowed in train.toml or unknown to the pinned prime-rl:",
}


@dataclass
class Import:
    """An imported config and its translation.

    `tree`: the config's tables. `values`: the values for train.toml. `names`: the paths in the config of keys with
    other names there. `notes`: lines about keys whose name or value changed.
    """

    tree: Mapping[str, Any]
    dialect: Dialect
    values: dict[str, Value]
    names: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: list[Problem] = field(default_factory=list)

    def places(self, key: str) -> list[str]:
        """Return the paths of an open key in the config; [] if the config does not have the key."""
        is_there = any(f"{'.'.join(path)}.".startswith(f"{key}.") for path, _ in _leaves(self.tree))
        return [*([key] if is_there else []), *self.names.get(key, [])]

    def leave_out(self, path: str, cause: str) -> None:
        """Remove a key and the keys below it from the values."""
        self.values = {p: value for p, value in self.values.items() if not f"{p}.".startswith(f"{path}.")}
        self.left_out.append(Problem(tuple(path.split(".")), None, cause, ""))

    def remove_left_out(self, *paths: str) -> None:
        """Remove these keys, which were translated, from the keys that were left out."""
        self.left_out = [problem for problem in self.left_out if ".".join(problem.path) not in paths]

    def report(self) -> list[str]:
        """Return lines about the changed keys, then about the keys that were left out, by owner."""
        lines = [f"read as a config of {self.dialect.name}: {len(self.values)} keys in train.toml"]
        lines += [f"  {note}" for note in [*self.notes, self.dialect.note] if note]
        for owner, title in _TITLES.items():
            problems = [problem for problem in self.left_out if (problem.lock.owner if problem.lock else "") == owner]
            lines += [title] if problems else []
            for problem in problems:
                use = f"; {problem.lock.use}" if problem.lock and problem.lock.use else ""
                use += f". Did you mean {problem.target}?" if problem.is_guess else ""
                lines.append(f"  {problem.cause}{use}")
        return lines

    def train_toml(self, name: str) -> bytes:
        """Return a train.toml with the values, in the order of the allow-list, each key with its meaning as a comment.

        An empty line or a comment separates the keys, as in the shipped file.
        """
        tables = {"": [f"# Imported from {clean(name, 80)}."]}
        for key, path in ((key, path) for key in KEYS for path in self.values if find_key(path) is key):
            table, _, leaf = path.rpartition(".")
            if self.values[path] == {}:
                tables.setdefault(path, [f"[{path}]"])
            else:
                line = f"{f'{leaf} = {value_text(self.values[path], MAX_LINE)}':<32} # {key.meaning}"
                lines = tables.setdefault(table, [f"[{table}]"])
                lines.append(f"\n{line}" if len(lines) > 1 else line)
        texts = ["\n".join(lines) for lines in tables.values()]
        return "\n\n".join([*texts, "# uv run run.py --keys lists every key.\n"]).encode()


def merged(files: Sequence[tuple[str, bytes]]) -> bytes:
    """Merge configs, (name, bytes) each, as `rl @ base.toml @ overlay.toml` does: a later file replaces keys and whole
    lists. The keys of a trainer.toml or an orchestrator.toml are put below that table. A single whole config is
    returned as it is, with its comments. ConfigError: a file is not TOML."""
    import tomlkit

    tree = dict[str, Any]()
    for name, source in files:
        _, tables = document(source, name, "Name a config file.")
        part = Path(name).stem
        if part in _PARTS and not tables.keys() & _PARTS:
            tables = {part: tables}
        elif len(files) == 1:
            return source
        _merge(tree, tables)
    return tomlkit.dumps(tree).encode()


def _merge(node: dict[str, Any], other: Mapping[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(node.get(name), dict) and isinstance(value, dict):
            _merge(node[name], value)
        else:
            node[name] = value


def _leaves(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and value of every key that is not a table with keys, and of every item of a list."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    for path, node in waiting:  # the list grows
        if isinstance(node, dict) and node:
            waiting += [((*path, name), value) for name, value in node.items()]
        elif isinstance(node, list):
            waiting += [(path, item) for item in node]
        else:
            yield path, node


def import_config(source: bytes, name: str, losses: Sequence[LossRules] = ()) -> Import:
    """Return the translation of a config. `name`: the name of the file in messages. `losses`: those of rules.toml.

    ConfigError: the config is not TOML, contains a secret, or has no key that is allowed in train.toml.
    """
    _, tree = document(source, name, "Name a config file.")
    texts = [path for path, value in _leaves(tree) if isinstance(value, str) and value]
    if names := [shorten(quoted(".".join(path))[1:-1], 80) for path in texts if any(map(_SECRET.match, path))]:
        cause = f"{name}: {listed(names)} would be printed, and committed as {IMPORTED_NAME}, which agents can read"
        raise ConfigError(cause, "Delete the secrets from the file.")
    values, problems = read_values(tree)
    result = Import(tree, _dialect(tree), values)
    if sign := next((path for path in _NOT_RL if at(tree, path) is not None), ""):  # values have another meaning
        cause = f"{name} has {sign}: it is a config of sft, evaluation or inference"
        raise ConfigError(cause, "Name a config of RL training.")
    for problem in problems:
        path, value, key = ".".join(problem.path), problem.value, find_key(problem.target)
        if tables_of(value) and is_inner(path):  # the keys of its tables have problems of their own
            continue
        if key is None or ANY in key.path or problem.is_guess or not is_accepted(key, value):
            result.left_out.append(problem)
        elif values.setdefault(key.path, accept(key, value)) != accept(key, value):
            cause = f"{spelled_out(problem.path, value)} is not copied: {key.path} is {value_text(values[key.path])}"
            result.left_out.append(problem._replace(cause=f"{cause} already"))
        else:
            values |= {table: {} for table in tables_around(key.path.split(".")) if find_key(table) is not None}
            result.names.setdefault(key.path, []).append(path)
            result.notes.append(f"{path} -> {key.path}" + ("" if value == {} else f" = {value_text(value)}"))
    entries, ratio_key = [*environments(tree)], ROWS[f"{RATIO}.{ANY}"]
    ratios = [(f"{path}.ratio", name, entry["ratio"]) for path, name, entry in entries if "ratio" in entry]
    are_valid = all(is_name(name) and is_accepted(ratio_key, ratio) for _, name, ratio in ratios)
    are_distinct = 1 < len({name for _, name, _ in entries}) == len(entries)
    for path, name, ratio in ratios if are_valid and are_distinct else ():
        values[f"{RATIO}.{name}"] = accept(ratio_key, ratio)
        result.notes.append(f"{path} -> {RATIO}.{name} = {value_text(ratio)}")
        result.remove_left_out(path)
    import_path = at(tree, LOSS) == "custom" and at(tree, IMPORT_PATH)
    for loss in losses:
        if loss.import_path == import_path:
            values[LOSS] = loss.name
            result.notes.append(f"{IMPORT_PATH} = {value_text(import_path)} -> {LOSS} = {value_text(loss.name)}")
            result.remove_left_out(LOSS, IMPORT_PATH)
            break
    for problem in loss_problems(values, losses):
        result.leave_out(".".join(problem.path), problem.cause)
    for path, reason in result.dialect.other_meaning.items():
        value = result.values.get(path, result.dialect.defaults.get(path))
        if value != result.dialect.defaults.get(path):
            result.leave_out(path, f"{path} = {value_text(value)} is not copied: {reason}")
    if not result.values:
        fix = "Name a config of prime-rl, of autoresearch-rl, or of prime's hosted training."
        raise ConfigError(f"{name} has no key that is allowed in train.toml", fix)
    has_size = GROUP_SIZE in result.values
    for path, default in result.dialect.defaults.items():
        if path not in result.values:
            result.values[path] = accept(ROWS[path], default)
            text = f"{path} = {'on' if default == {} else value_text(default)}: the default of {result.dialect.name}"
            result.notes.append(f"{text} (today {default_text(ROWS[path])})")
    if result.dialect.name == PRIME_RL and at(tree, "trainer.loss.type") is None:
        result.notes.append(_NEW_LOSS)
    # Leave out keys that break a rule between keys. A group of one, and a group size that the file does not have,
    # become a size that divides the batch.
    for _ in range(len(result.values) + 2):  # each round leaves out or adds one key
        problems = rule_problems(result.values, resolve(result.values))
        if not problems:
            break
        path, cause, batch = ".".join(problems[0].path), problems[0].cause, result.values.get(BATCH_SIZE) or 4
        assert isinstance(batch, int)
        sizes = [size for size in (4, *range(2, batch + 1)) if batch % size == 0]
        if path in (GROUP_SIZE, BATCH_SIZE) and sizes and (not has_size or result.values.get(GROUP_SIZE) == 1):
            result.values[GROUP_SIZE] = sizes[0]
            result.notes.append(f"{GROUP_SIZE} = {sizes[0]}, added: {cause}")
        else:
            key = find_key(path)
            default = f"; {default_text(key)}, the default, is trained" if key and key.default is not None else ""
            result.leave_out(path, f"{cause}{default}")
    else:
        raise ConfigError("the keys of this config contradict each other", "Write the train.toml by hand.")
    parse(result.train_toml("a config"))
    return result


def _dialect(tree: Mapping[str, Any]) -> Dialect:
    """Return the format of a config, by keys that only this format has."""

    def has(path: str) -> bool:
        return not isinstance(at(tree, path), dict | None)

    for dialect in DIALECTS:
        if any(map(has, dialect.signs)) or (dialect.needs and all(map(has, dialect.needs))):
            return dialect
    paths = [path for path, _ in _leaves(tree) if path]
    is_prime_rl = any(path[1:] and (find_key(".".join(path)) or ".".join(path) in FORMER) for path in paths)
    origins = {renamed[1] for path in paths if (renamed := find_renamed(path))} - {"", OTHER_VERSION, PRIME_RL}
    return Dialect(PRIME_RL if is_prime_rl or not origins else listed(sorted(origins)))


def at(tree: Any, path: str) -> Any:
    """Return the value at a dotted path; None if there is none."""
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def environments(tree: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the environments that a config trains on: the path of the list; the name, as of a folder in environments/,
    or ""; and the entry."""
    for path in CARRIED["environments"]:
        for entry in tables_of(at(tree, path)):
            words = (at(entry, key) for key in ("env.taskset.id", "taskset.id", "id", "name"))
            word = next((word for word in words if isinstance(word, str)), "")
            yield path, word.rpartition("/")[2].partition("@")[0].replace("-", "_"), entry


def carried_rules(imported: Import, root: Path, gpu_count: int) -> tuple[bytes, list[str]]:
    """Return rules.toml with the environments and the model of an imported config, and notes for the user.

    Environments or a model that this checkout does not have are left out, and the ratios of the environments too.
    """
    import tomlkit  # slow to import

    before = read_source(root / RULES_NAME)
    settings, trains, notes, data = dict[str, Any](), dict[str, Any](), list[str](), before
    if names := [*dict.fromkeys(name for _, name, _ in environments(imported.tree) if name)]:
        trains["environments"] = names
    models = (at(imported.tree, path) for path in CARRIED["model"])
    model = next((model for model in models if isinstance(model, str)), "")
    revision = REVISIONS.get(model)
    own = {"model": model, "revision": revision or ""} if revision or (model and (root / model).is_dir()) else {}
    if model and not own:
        notes.append(f"model = {value_text(model)}: write the model and its commit on the hub into {RULES_NAME}")
    wanted, cause = trains | own, ""
    for group in filter(None, (wanted, trains, own)):  # all, else a part
        try:
            document = tomlkit.parse(before.decode())
            document.update(group)
            data = tomlkit.dumps(document).encode()
            rules_of(root, chosen_in(root, data), None, max(gpu_count, 2))  # as on a machine with enough GPUs
            settings = group
            break
        except (UsageError, ValueError) as error:
            cause, data = cause or str(error).removeprefix(f"{RULES_NAME}: "), before
    if dropped := [name for name in wanted if name not in (*settings, "revision")]:
        line = f"{RULES_NAME}: not copied: {' and '.join(dropped)}: {cause}"
        notes.append(f"{line} docs/environments.md describes how to add an environment")
    if "environments" in settings:
        notes.append("the environments are those of this checkout: their prompts and rewards may differ")
    elif any(path.startswith(f"{RATIO}.") for path in imported.values):
        imported.leave_out(RATIO, f"{RATIO} is not copied: {RULES_NAME} does not have these environments")
    if "model" in settings:
        imported.remove_left_out(*CARRIED["model"])
    return data, [*(f"{RULES_NAME}: {line}" for line in tomlkit.dumps(settings).splitlines()), *notes]
