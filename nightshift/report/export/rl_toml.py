"""`nightshift export --to rl.toml`: the config of an experiment, for `rl`, the launcher of prime-rl.

The config contains train.toml and the values that the rules and the engine set. If the campaign began with `nightshift
import`, the config is the imported file, in which only the keys that the experiment changed are edited.
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
    """Return the config of an experiment (`number` None: of the incumbent), with comments on how to run it. UsageError
    if the experiment has no config, another engine trained it, or the checkout has other rules than the experiment."""
    configs = story.campaign.configs  # of baseline and incumbent
    config = story.configs.get(number) if number is not None else configs and configs[1]
    name = "the incumbent" if number is None else f"experiment {number:04d}"
    if config is None:
        raise UsageError(f"{name} has no train.toml", "Run the baseline first, or choose another --experiment.")
    rules = next(filter(None, map(story.rules, reversed(story.records))), None)
    if rules is None:
        raise UsageError("the campaign's rules are unknown: runs/ has no readable job.json", "Restore runs/.")
    if rules.engine != ENGINE:
        cause = f"{name} was trained by the engine {rules.engine}, and no prime-rl config reproduces this training"
        raise UsageError(cause, "Train it with prime-rl first: uv run run.py --engine prime-rl, on a new branch.")
    if rules.hash(root) != story.rules_hash:
        cause = f"{name} was trained under other rules ({story.rules_hash}) than those of this checkout"
        raise UsageError(cause, f"Check out the campaign's branch: git switch {story.branch}.")
    run = next((r for r in story.records if r.number == number), story.campaign.incumbent_run)
    result = run.result if run else None
    engine = PrimeRlEngine(rules, root, environ)
    head = [
        f"{name} of {story.branch}, for prime-rl {engine.installation.pins.commit}",
        f"model {rules.model}{f', revision {rules.model_revision}' if rules.model_revision else ''}",
        f"trained {f'for {result.training.num_steps} steps ' if result else ''}in a budget of {rules.budget_text}; "
        "prime-rl has no budget: it trains until max_steps, or without end if max_steps is None",
    ]
    if rules.learning_rate_scale != 1:
        head.append(f"learning rates: the values in train.toml times {rules.learning_rate_scale:g}")
    source = Repo(root).config_at(story.records[0].commit or "", IMPORTED_NAME)
    dialect = import_config(source, IMPORTED_NAME).dialect if source else None
    if source and dialect and dialect.name.startswith(PRIME_RL):
        try:
            return edited(source, config, rules, head)
        except ConfigError as error:
            head.append(f"the imported file is not used: {error}")
    environments = engine.installation.environments_dir(root, rules).relative_to(engine.installation.root)
    model = shlex.quote(str(model_folder(rules, root)))
    head += [
        "run it in the prime-rl checkout that prepare.py installed:",
        f"  HF_HUB_OFFLINE=1 PYTHONPATH=$PWD/{environments} uv run --no-sync rl @ THIS_FILE --model.name {model}",
    ]
    if rules.memory.startswith("1 x"):
        head.append("trained with server and trainer on one GPU; prime-rl's launcher needs two GPUs")
    return rl_toml(engine.validate(config).settings, result.seed if result else rules.seed(0), head)


def edited(source: bytes, config: Config, rules: Rules, head: list[str]) -> bytes:
    """Return the imported file, edited in the keys in which `config` differs from the train.toml of the import.
    Comments below `head` list these keys, and values that the import added. ConfigError if the format of the file
    cannot express a key."""
    scale = rules.learning_rate_scale
    imported = import_config(source, IMPORTED_NAME, rules.losses)
    before = parse(imported.train_toml(IMPORTED_NAME))
    values: dict[str, Any] = {key: config.values.get(key, ABSENT) for key in changed_keys(before, config)}
    values |= in_prime_rl(config, rules.losses)
    if at(imported.tree, IMPORT_PATH) is not None:
        values.setdefault(IMPORT_PATH, ABSENT)  # a loss of prime-rl needs no import path
    if scale != 1:
        values |= {key: config.get(key) * scale for key in LEARNING_RATES if config.get(key)}
    document, tree = tomlkit.parse(source.decode()), tomllib.loads(source.decode())
    for node in (document, tree):
        for key, value in values.items():
            _change(node, _places(imported, key), key, value)
    text = tomlkit.dumps(document)
    is_intact = False
    with suppress(tomllib.TOMLDecodeError):
        is_intact = tomllib.loads(text) == tree
    if not is_intact:  # tomlkit lost a table that became empty: write the file without comments
        text = tomlkit.dumps(tree)
    lost: tuple[Change, ...] = ()
    with suppress(ConfigError):  # import_config refuses a file without a key of train.toml
        again = import_config(text.encode(), IMPORTED_NAME, rules.losses).train_toml(IMPORTED_NAME)
        lost = tuple(change for change in diff(parse(again), config) if not change.key.startswith(f"{PARAMETERS}."))
    scaled = LEARNING_RATES if scale != 1 else ()
    inexpressible = [key for key in values if not _places(imported, key)]
    inexpressible = inexpressible or [change.key for change in lost if change.key not in scaled]
    if inexpressible:
        raise ConfigError(f"a config of {imported.dialect.name} cannot express: {listed(inexpressible)}")
    lines = [
        f"the imported config of {imported.dialect.name}, except for:",
        *(f"  {change.line}" for change in diff(before, config)),
        *(
            f"also trained with (not in this file): {key} = {value_text(value)}"
            for key, value in imported.values.items()
            if value != {} and key not in values and not key.startswith(f"{RATIO}.") and not imported.places(key)
        ),
    ]
    return f"{_comment(head + lines)}\n\n{text}".encode()


def _places(imported: Import, key: str) -> list[str]:
    """Return the paths of an open key in the file, or else the path at which to add the key. [] if the file sets a
    similar key, or if the name of the key in the file's version of prime-rl is not certain."""
    paths, known = imported.places(key), find_key(key)
    if paths or known is None or key.startswith(f"{RATIO}."):
        return paths or [key]
    if any(at(imported.tree, word) is not None for word in known.near):
        return []
    is_old = imported.dialect.name != PRIME_RL or (FORMER.keys() - ALIASES.keys()) & {*chain(*imported.names.values())}
    if not is_old or not (known.former or key.startswith("orchestrator.")):
        return [key]
    paths = [path for path in (key, *known.former) if isinstance(at(imported.tree, path.rpartition(".")[0]), dict)]
    return paths if len(paths) == 1 else []


def _change(tree: Any, places: Sequence[str], key: str, value: Any) -> None:
    """Set an open key of the file, or remove it if `value` is ABSENT. The ratio of an environment is a key of its entry
    in the list of sources. The keys of all sources are skipped if the file has no sources."""
    sources = tables_of(at(tree, SOURCE))
    if key.startswith(f"{RATIO}."):
        for source in (source for source in sources if environment_name(source) == key.removeprefix(f"{RATIO}.")):
            _set(source, ("ratio",), value)
    elif sources or not key.startswith(f"{SOURCE}."):
        for place in places:
            _set(tree, place.split("."), value)


def _set(node: Any, path: Sequence[str], value: Any, depth: int = 0) -> None:
    """Set or remove a key of a table, or of each table of a list. Remove an empty table that switches nothing on."""
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
        elif value != {}:
            table[name] = "None" if value is None else list(value) if isinstance(value, tuple) else value
        elif not is_table:
            table[name] = tomlkit.inline_table()


def rl_toml(settings: Mapping[str, Any], seed: int, head: list[str]) -> bytes:
    """Return the settings of a prime-rl run, with its seed, as TOML below the comment `head`."""
    tree = with_seed(settings, seed)
    # Remove the keys that Nightshift sets to supervise a run: prime-rl's launcher chooses their values.
    del tree["clean"], tree["rollout_transport"], tree["inference"]["server"]
    del tree["trainer"]["monitors"], tree["orchestrator"]["monitors"]
    return f"{_comment(head)}\n\n{tomlkit.dumps(_without_null(tree))}".encode()


def _comment(lines: Sequence[str]) -> str:
    return "\n".join(f"# {clean(line)}" for line in lines)


def _without_null(node: Any) -> Any:
    """Return the tables with "None" instead of null. TOML has no null; prime-rl reads "None" as null."""
    if isinstance(node, list):
        return [_without_null(item) for item in node]
    if isinstance(node, dict):
        return {name: _without_null(value) for name, value in node.items()}
    return "None" if node is None else node
