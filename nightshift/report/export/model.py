"""`nightshift export --to model`: an experiment's weights as a folder that transformers loads, with a model card.

An agent can write to the folder in runs/. So only regular files of known kinds are copied, never code, and only weights
that are byte for byte the scored ones.
"""

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from nightshift.campaign.records import MODEL_NAME, Record
from nightshift.config.rules_toml import HUB_NAME
from nightshift.config.train_toml import diff
from nightshift.errors import EngineError, UsageError
from nightshift.files import nesting_limit, parse_json, read_file, whole_folder, write_atomically, write_json
from nightshift.report.data import Story, gather
from nightshift.report.markdown import markdown
from nightshift.report.text import certificate_line

_KINDS = (".safetensors", ".json", ".jinja", ".txt", ".model")  # weights, configuration, tokenizers; no code, no pickle
_VOCABULARIES = ("tokenizer.json", "vocab.json")  # may contain any word
_CODE = ("auto_map", "custom_pipelines", "custom_generate")  # keys that name code, which transformers would run
_ONE_FILE = "model.safetensors"
_AGAIN = "Train its train.toml again, on a branch of its own."


def copy_model(story: Story, number: int | None, target: Path) -> Path:
    """Write the model of an experiment atomically to the new folder `target`. Return the folder. `number` None: the
    last run of exactly the incumbent's config.

    Raises:
        UsageError: `target` is not empty, no run trained the incumbent's config, or the weights are gone.
        EngineError: the weights are not the scored ones, or a configuration file names code.
    """
    best = story.campaign.incumbent_run
    record = best if number is None else next((r for r in story.records if r.number == number), None)
    if record is None:
        what = "run of exactly the incumbent" if number is None else f"experiment {number:04d}"
        fix = "Train it: uv run run.py --again. Or name an experiment: --experiment NNNN."
        raise UsageError(f"{story.branch} has no {what}", fix)
    source = story.ledger.run_dir(record.number) / MODEL_NAME
    if source.is_symlink() or not source.is_dir():
        raise UsageError(f"the weights of experiment {record.number:04d} are gone: {source} is not a folder", _AGAIN)
    with whole_folder(target) as partial:
        _copy(source, partial)
        _check(partial, record)
        _name_base(partial, story, record)
        write_atomically(partial / "README.md", card(story, record).encode(errors="replace"))
    return target


def _copy(source: Path, target: Path) -> None:
    """Copy the regular files of known kinds at the top of the folder. EngineError if a file names code that
    transformers would run."""
    for path in sorted(source.iterdir()):
        if not path.name.endswith(_KINDS) or path.name.startswith(".") or path.is_symlink() or not path.is_file():
            continue
        shutil.copyfile(path, target / path.name)
        is_configuration = path.name.endswith(".json") and path.name not in _VOCABULARIES
        keys = _keys((target / path.name).read_bytes()) if is_configuration else set()
        if code := next((name for name in _CODE if name in keys), None):
            raise EngineError(f"{path} has {code}: transformers would run that code", _AGAIN)


def _keys(data: bytes) -> set[str]:
    """Return all keys of a JSON document, at any depth; empty if it is not valid, since then nothing reads it."""
    keys = set[str]()
    with suppress(ValueError), nesting_limit():
        json.loads(data, object_pairs_hook=lambda pairs: keys.update(dict(pairs)))
    return keys


def _check(folder: Path, record: Record) -> None:
    """Raise EngineError if the copied weights are not the scored ones."""
    from nightshift.engines.prime_rl.weights import check_weights, whole_files

    hashes = [check_weights(folder)]  # as the engine prime-rl hashes one file or several
    if whole_files(folder) == [_ONE_FILE]:  # as the engine trl does
        with (folder / _ONE_FILE).open("rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    recorded = record.evaluation.weights.sha256 if record.evaluation else None
    if recorded not in hashes:
        cause = f"the weights of experiment {record.number:04d} are not the scored ones"
        raise EngineError(f"{cause} (sha256 {hashes[-1][:12]}, recorded {str(recorded)[:12]})", _AGAIN)


def _name_base(folder: Path, story: Story, record: Record) -> None:
    """Replace the base model's path on this machine, in the configuration of an adapter, by the name in the rules."""
    path, rules = folder / "adapter_config.json", story.rules(record)
    if path.exists() and rules is not None:
        config = parse_json(read_file(path), dict[str, Any])
        name = rules.model if HUB_NAME.fullmatch(rules.model) else ""
        write_json(path, config | {"base_model_name_or_path": name, "revision": rules.model_revision})


def card(story: Story, record: Record) -> str:
    """Return the model card, without free text and without a path of this machine."""
    rules, evaluation = story.rules(record), record.evaluation
    base = "not recorded" if rules is None else rules.model if HUB_NAME.fullmatch(rules.model) else "a local folder"
    revision = f" at {rules.model_revision}" if rules and rules.model_revision else ""
    assert evaluation is not None  # _check compared its weights
    steps = evaluation.weights.step
    low, high = (evaluation.eval_score + sign * 1.96 * evaluation.eval_stderr for sign in (-1, 1))
    interval = f"95 % interval over its examples {max(low, 0):.4f} to {min(high, 1):.4f}"
    configs, config = story.campaign.configs, story.configs.get(record.number)
    changes = diff(configs[0], config) if configs and config else None
    lines = "not recorded" if changes is None else "\n".join(f"    {change.line}" for change in changes) or "none"
    page, certificate = gather(story.ledger, story.branch), "Not certified: no certificate compares its config."
    if configs and record.config_hash == configs[1].hash and not page.obsolete:
        certificate = certificate_line(page)
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
---

# Experiment {record.number:04d} of {markdown(story.tag)}

- Base model: {markdown(base + revision)}. Its licence applies; this card does not record it.
- Trained by reinforcement learning with Nightshift on {markdown(", ".join(record.environments))}.
- Engine {record.engine}, rules {markdown(record.rules_name)}, {markdown(record.hardware)}, steps: {steps}.
- Score on the validation split, which chose among experiments: {evaluation.eval_score:.4f}, {interval}.
- {markdown(certificate, 2000)}
- Load it with AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained of transformers.

Changes to the baseline's train.toml:

{lines}
"""
