"""`nightshift export --to rl.toml`: the config of an experiment, for `rl`, the launcher of prime-rl.

The config contains train.toml and the values that the rules and the engine set. If the campaign began with `nightshift
import`, the config is the imported file, in which only the keys that the experiment changed are edited.
"""

import shlex
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import tomlkit

from nightshift.campaign.git import Repo
from nightshift.config.allowlist import FORMER, IMPORT_PATH, PARAMETERS, PRIME_RL, RATIO, SOURCE, find_key, value_text
from nightshift.config.checks import tables_of
from nightshift.config.import_config import IMPORTED_NAME, Import, at, import_config
from nightshift.config.losses import in_prime_rl
from nightshift.config.rules import Rules
from nightshift.config.train_toml import ABSENT, Config, changed_keys, diff, parse
from nightshift.config.train_toml import document as parse_document
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
    if source := Repo(root).config_at(story.records[0].commit or "", IMPORTED_NAME):
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
    return rl_toml(engine.validate(config).settings, result.seed if result else rules.first_seed, head)


def edited(source: bytes, config: Config, rules: Rules, head: list[str]) -> bytes:
    """Return the imported file with the values of `config`. Comments below `head` list the changed keys, and the values
    that the import added. ConfigError if the format of the file cannot express a key."""
    scale = rules.learning_rate_scale
    imported = import_config(source, IMPORTED_NAME, rules.losses)
    format_name = imported.dialect.name
    if not format_name.startswith(PRIME_RL):
        raise ConfigError(f"it is a config of {format_name}")
    before = parse(imported.train_toml(IMPORTED_NAME))
    values: dict[str, Any] = {key: config.values.get(key, ABSENT) for key in changed_keys(before, config)}
    values |= in_prime_rl(config, rules.losses)
    if at(imported.tree, IMPORT_PATH) is not None:
        values.setdefault(IMPORT_PATH, ABSENT)  # a loss of prime-rl needs no import path
    if scale != 1:
        values |= {key: config.get(key) * scale for key in LEARNING_RATES if config.get(key)}
    places = {key: _places(imported, key) for key in values}
    document = tomlkit.parse(source.decode())
    for key, place in ((key, place) for key, key_places in places.items() for place in key_places):
        _set(document, place.split("."), values[key])
    text = tomlkit.dumps(document)
    _, written = parse_document(text.encode(), IMPORTED_NAME)
    if written != document.unwrap():  # tomlkit lost a table that became empty
        raise ConfigError("its comments would be lost")
    again = parse(import_config(text.encode(), IMPORTED_NAME, rules.losses).train_toml(IMPORTED_NAME))
    kept = (f"{PARAMETERS}.", *(LEARNING_RATES if scale != 1 else ()))  # written with other values than train.toml's
    lost = [change.key for change in diff(again, config) if not change.key.startswith(kept)]
    if inexpressible := [key for key in values if not places[key]] or lost:
        raise ConfigError(f"a config of {format_name} cannot express: {listed(inexpressible)}")
    lines = [
        f"the imported config of {format_name}, except for:",
        *(f"  {change.line}" for change in diff(before, config)),
        *(
            f"also trained with (not in this file): {key} = {value_text(value)}"
            for key, value in imported.values.items()
            if value != {} and key not in values and not key.startswith(f"{RATIO}.") and not imported.places(key)
        ),
    ]
    return f"{_comment(head + lines)}\n\n{text}".encode()


def _places(imported: Import, key: str) -> list[str]:
    """Return the paths of an open key in the file, or else the path at which to add the key. [] if the key has no sure
    place: the ratio of an environment, a key of sources that the file does not have, a key with a similar one in the
    file, or a new key whose name in an older version of prime-rl may be another one."""
    paths, known = imported.places(key), find_key(key)
    if key.startswith(f"{RATIO}.") or (key.startswith(f"{SOURCE}.") and not tables_of(at(imported.tree, SOURCE))):
        return []
    if paths or known is None:
        return paths or [key]
    is_old = any(path in FORMER and not path.startswith(SOURCE) for path in chain(*imported.names.values()))
    is_renamed = is_old and (known.former or key.startswith("orchestrator."))
    return [] if is_renamed or any(at(imported.tree, word) is not None for word in known.near) else [key]


def _set(node: Any, path: Sequence[str], value: Any, above: str = "") -> None:
    """Set or remove a key of a table, or of each table of a list. Remove an empty table that switches nothing on."""
    name, *rest = path
    for table in node if isinstance(node, list) else [node]:
        is_table = isinstance(table.get(name), dict | list)
        if value is ABSENT and not (rest and is_table):
            table.pop(name, None)
        elif not rest and value != {}:
            table[name] = "None" if value is None else list(value) if isinstance(value, tuple) else value
        else:
            if not is_table:
                table[name] = tomlkit.inline_table()  # also valid next to dotted keys
            if rest:
                _set(table[name], rest, value, f"{above}{name}.")
            if table[name] == {} and not find_key(f"{above}{name}") and f"{above}{name}" not in FORMER:
                del table[name]


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
