"""`nightshift export --to rl.toml`: the config of an experiment, for prime-rl's own launcher.

It contains what the engine composes for a run: train.toml, and the values that rules and engine fix. For a campaign
that began with `nightshift import`, it is the imported file with the kept keys changed.
"""

import shlex
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import tomlkit

from nightshift.campaign.git import Repo
from nightshift.config.allowlist import (
    ALIASES,
    FORMER,
    IMPORT_PATH,
    PARAMETERS,
    PRIME_RL,
    RATIO,
    SOURCE,
    find_key,
    value_text,
)
from nightshift.config.checks import tables_of
from nightshift.config.import_config import IMPORTED_NAME, Import, at, environment_name, import_config, is_known
from nightshift.config.losses import in_prime_rl
from nightshift.config.rules import Rules
from nightshift.config.train_toml import ABSENT, Change, Config, changed_keys, diff, parse
from nightshift.engines.base import LEARNING_RATES
from nightshift.engines.downloads import model_folder
from nightshift.engines.prime_rl.config import with_seed
from nightshift.engines.prime_rl.engine import PrimeRlEngine
from nightshift.engines.prime_rl.install import ENGINE
from nightshift.errors import ConfigError, UsageError, listed
from nightshift.report.data import Story
from nightshift.text import clean


def as_rl_toml(story: Story, number: int | None, root: Path, environ: Mapping[str, str]) -> bytes:
    """Return the config of an experiment, with comments on how to run it. `number` None: of the incumbent. UsageError
    if there is none, prime-rl did not train it, or the rules of the checkout have changed since."""
    configs = story.campaign.configs
    config = story.configs.get(number) if number is not None else configs and configs[1]
    name = "the incumbent" if number is None else f"experiment {number:04d}"
    if config is None:
        raise UsageError(f"{name} has no train.toml", "Run the baseline, or name another --experiment.")
    rules = next(filter(None, map(story.rules, reversed(story.records))), None)
    if rules is None:
        raise UsageError("the rules of the campaign are gone: runs/ has no readable job.json", "Restore runs/.")
    if rules.engine != ENGINE:
        cause = f"{name} was trained by the engine {rules.engine}, and no config of prime-rl trains the same"
        raise UsageError(cause, "Measure it with prime-rl first: uv run run.py --engine prime-rl, on a new branch.")
    if rules.hash(root) != story.rules_hash:
        cause = f"{name} was measured under other rules ({story.rules_hash}) than those of this checkout"
        raise UsageError(cause, f"Check out the campaign: git switch {story.branch}.")
    run = next((r for r in story.records if r.number == number), story.campaign.incumbent_run)
    result = run.result if run else None
    engine = PrimeRlEngine(rules, root, environ)
    head = [
        f"{name} of {story.branch}, for prime-rl {engine.installation.pins.commit}",
        f"model {rules.model}{f', revision {rules.model_revision}' if rules.model_revision else ''}",
        f"trained: {f'{result.training.num_steps} steps in ' if result else ''}a budget of {rules.budget_text}; "
        "prime-rl trains until max_steps, without end if max_steps is None",
    ]
    if rules.learning_rate_scale != 1:
        head.append(f"learning rates: the values in train.toml times {rules.learning_rate_scale:g}")
    source = Repo(root).config_at(story.records[0].commit or "", IMPORTED_NAME)
    dialect = import_config(source, IMPORTED_NAME).dialect if source else None
    if source and dialect and dialect.is_rl and dialect.name.startswith(PRIME_RL):
        try:
            return edited(source, config, rules, head)
        except ConfigError as error:
            head.append(f"not the imported file: {error}")
    environments = engine.installation.environments_dir(root, rules).relative_to(engine.installation.root)
    model = shlex.quote(str(model_folder(rules, root)))
    head += [
        "run it in the prime-rl checkout that prepare.py filled:",
        f"  HF_HUB_OFFLINE=1 PYTHONPATH=$PWD/{environments} uv run --no-sync rl @ THIS_FILE --model.name {model}",
    ]
    if rules.memory.startswith("1 x"):
        head.append("measured with server and trainer on one GPU; prime-rl's launcher needs two")
    return rl_toml(engine.validate(config).settings, result.seed if result else rules.seed(0), head)


def edited(source: bytes, config: Config, rules: Rules, head: list[str]) -> bytes:
    """Return the imported file with the keys in which `config` differs from the train.toml of that import.

    Comments below `head` name these keys, and other values of the training. ConfigError if the file has no place for a
    key under its own names.
    """
    scale = rules.learning_rate_scale
    imported = import_config(source, IMPORTED_NAME, rules.losses)
    before = parse(imported.train_toml(IMPORTED_NAME))
    values: dict[str, Any] = {key: config.values.get(key, ABSENT) for key in changed_keys(before, config)}
    values |= in_prime_rl(config, rules.losses)
    if at(imported.tree, IMPORT_PATH) is not None:
        values.setdefault(IMPORT_PATH, ABSENT)
    if scale != 1:
        values |= {key: config.get(key) * scale for key in LEARNING_RATES if config.get(key)}
    document, tree = tomlkit.parse(source.decode()), tomllib.loads(source.decode())
    for node in (document, tree):
        for key, value in values.items():
            _change(node, _places(imported, key), key, value)
    text = tomlkit.dumps(document)
    is_whole = False
    with suppress(tomllib.TOMLDecodeError):
        is_whole = tomllib.loads(text) == tree
    if not is_whole:  # tomlkit lost a table that became empty: write the file without comments
        text = tomlkit.dumps(tree)
    missing: tuple[Change, ...] = ()
    with suppress(ConfigError):  # of a file without any research key
        again = import_config(text.encode(), IMPORTED_NAME, rules.losses).train_toml(IMPORTED_NAME)
        missing = tuple(change for change in diff(parse(again), config) if not change.key.startswith(f"{PARAMETERS}."))
    scaled = LEARNING_RATES if scale != 1 else ()
    homeless = [key for key in values if not _places(imported, key)]
    homeless = homeless or [change.key for change in missing if change.key not in scaled]
    if homeless:
        raise ConfigError(f"a config of {imported.dialect.name} has no place for: {listed(homeless)}")
    lines = [
        f"the imported config of {imported.dialect.name}, except for:",
        *(f"  {change.line}" for change in diff(before, config)),
        *(
            f"also trained with: {key} = {value_text(value)}"
            for key, value in imported.values.items()
            if value != {} and key not in values and not key.startswith(f"{RATIO}.") and not imported.places(key)
        ),
    ]
    return f"{_comment(head + lines)}\n\n{text}".encode()


def _places(imported: Import, key: str) -> list[str]:
    """Return the places at which the file has, or could have, an open key; [] if the file has another form of the key,
    or perhaps another name for it."""
    places, row = imported.places(key), find_key(key)
    if places or row is None or key.startswith(f"{RATIO}."):
        return places or [key]
    if any(at(imported.tree, word) is not None for word in row.near):
        return []
    is_old = imported.dialect.name != PRIME_RL or (FORMER.keys() - ALIASES.keys()) & {*chain(*imported.names.values())}
    if not is_old or not (row.former or key.startswith("orchestrator.")):
        return [key]
    names = [name for name in (key, *row.former) if isinstance(at(imported.tree, name.rpartition(".")[0]), dict)]
    return names if len(names) == 1 else []


def _change(tree: Any, places: Sequence[str], key: str, value: Any) -> None:
    """Set or remove (ABSENT) an open key of a config. A ratio is in the source of its environment. Keys of sources are
    set only if there are sources."""
    sources = tables_of(at(tree, SOURCE))
    if key.startswith(f"{RATIO}."):
        for source in (source for source in sources if environment_name(source) == key.removeprefix(f"{RATIO}.")):
            _set(source, ("ratio",), value)
    elif sources or not key.startswith(f"{SOURCE}."):
        for place in places:
            _set(tree, place.split("."), value)


def _set(node: Any, path: Sequence[str], value: Any, depth: int = 0) -> None:
    """Set or remove a key of a table, or of each table of a list. Remove a table that became empty and is no key."""
    name, is_last = path[depth], depth + 1 == len(path)
    for table in node if isinstance(node, list) else [node]:
        is_table = isinstance(table.get(name), dict | list)
        if not is_last and (is_table or value is not ABSENT):
            if not is_table:
                table[name] = tomlkit.inline_table()  # also valid next to dotted keys
            _set(table[name], path, value, depth + 1)
            if table[name] == {} and not is_known(".".join(path[: depth + 1])):
                del table[name]
        elif value is ABSENT:
            table.pop(name, None)
        elif not (value == {} and is_table):
            is_list, empty = isinstance(value, tuple), tomlkit.inline_table()
            table[name] = "None" if value is None else empty if value == {} else list(value) if is_list else value


def rl_toml(settings: Mapping[str, Any], seed: int, head: list[str]) -> bytes:
    """Return the settings of a prime-rl run, with its seed, as TOML below the comment `head`."""
    tree = with_seed(settings, seed)
    # Nightshift sets these to supervise a run; prime-rl's own launcher chooses them.
    del tree["clean"], tree["rollout_transport"], tree["inference"]["server"]
    del tree["trainer"]["monitors"], tree["orchestrator"]["monitors"]
    return f"{_comment(head)}\n\n{tomlkit.dumps(_without_null(tree))}".encode()


def _comment(lines: Sequence[str]) -> str:
    return "\n".join(f"# {clean(line)}" for line in lines)


def _without_null(node: Any) -> Any:
    """Return the tables with "None", which prime-rl reads as null, in place of null."""
    if isinstance(node, list):
        return [_without_null(item) for item in node]
    if isinstance(node, dict):
        return {name: _without_null(value) for name, value in node.items()}
    return "None" if node is None else node
