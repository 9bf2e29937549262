"""`nightshift export --to model`: an experiment's weights as a folder that transformers loads, with a model card.

An agent can write to runs/. So only regular files of known kinds are copied, never code, and only the scored weights.
"""

import hashlib
import shutil
from pathlib import Path
from typing import Any

from nightshift.campaign.records import MODEL_NAME, Record
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import HUB_NAME
from nightshift.config.train_toml import diff
from nightshift.errors import EngineError, UsageError
from nightshift.files import as_json, parse_json, read_file, whole_folder, write_atomically, write_json
from nightshift.report.data import Story, gather
from nightshift.report.markdown import markdown
from nightshift.report.text import certificate_line

_KINDS = (".safetensors", ".json", ".jinja", ".txt", ".model")  # weights, configuration, tokenizers; no code, no pickle
_VOCABULARIES = ("tokenizer.json", "vocab.json")  # may contain any word
_CODE = ('"auto_map"', '"custom_pipelines"', '"custom_generate"')  # keys that name code, which transformers would run
_AGAIN = "Train its train.toml again, on a branch of its own."


def copy_model(story: Story, number: int | None, target: Path) -> Path:
    """Write the model of an experiment (`number` None: of the last run of the incumbent's config) to the new folder
    `target`. UsageError without such a run or its weights; EngineError for other weights, or if a file names code."""
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
        _name_base(partial, story.rules(record))
        write_atomically(partial / "README.md", card(story, record).encode(errors="replace"))
    return target


def _copy(source: Path, target: Path) -> None:
    """Copy the regular files of known kinds at the top of the folder. EngineError if a file names code that
    transformers would run."""
    for path in sorted(source.iterdir()):
        if path.suffix not in _KINDS or path.name.startswith(".") or path.is_symlink() or not path.is_file():
            continue
        shutil.copyfile(path, target / path.name)
        if path.suffix == ".json" and path.name not in _VOCABULARIES:
            try:
                text = as_json(parse_json(read_file(target / path.name), Any)).decode()  # without escapes in keys
            except ValueError as error:  # transformers may read what is not strict JSON
                raise EngineError(f"{path}: {error}", _AGAIN) from None
            if code := next((key for key in _CODE if key in text), None):
                raise EngineError(f"{path} has {code}: transformers would run that code", _AGAIN)


def _check(folder: Path, record: Record) -> None:
    """Raise EngineError if the copied weights are not the scored ones."""
    from nightshift.engines.prime_rl.weights import check_weights

    hashes = [check_weights(folder)]  # as the engine prime-rl hashes one file or several
    if (path := folder / "model.safetensors").exists():  # as the engine trl does
        with path.open("rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    recorded = record.evaluation.weights.sha256 if record.evaluation else None
    if recorded not in hashes:
        cause = f"the weights of experiment {record.number:04d} are not the scored ones"
        raise EngineError(f"{cause} (sha256 {hashes[-1][:12]}, recorded {str(recorded)[:12]})", _AGAIN)


def _base(rules: Rules | None) -> str:
    """Return the name of the base model, without a path of this machine."""
    if rules is None:
        return "not recorded"
    return rules.model if HUB_NAME.fullmatch(rules.model) else "a local folder"


def _name_base(folder: Path, rules: Rules | None) -> None:
    """Replace the base model's path on this machine, in the configuration of an adapter, by the name in the rules."""
    path = folder / "adapter_config.json"
    if path.exists():
        config = parse_json(read_file(path), dict[str, Any])
        write_json(path, config | {"base_model_name_or_path": _base(rules), "revision": rules and rules.model_revision})


def card(story: Story, record: Record) -> str:
    """Return the model card, without free text and without a path of this machine."""
    rules, evaluation, config = story.rules(record), record.evaluation, story.configs.get(record.number)
    assert evaluation is not None  # _check compared its weights
    revision = rules.model_revision if rules else None
    configs, changes = story.campaign.configs, "    not recorded"
    if configs and config:
        changes = "\n".join(f"    {change.line}" for change in diff(configs[0], config))
    certificate = "Not certified: no certificate compares its config."
    if configs and record.config_hash == configs[1].hash:
        morning = gather(story.ledger, story.branch)
        certificate = ("Other runs of this config: " if morning.certificate else "") + certificate_line(morning)
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
---

# Experiment {record.number:04d} of {markdown(story.tag)}

- Base model: {markdown(_base(rules))}. Its licence applies; this card does not record it. Revision: {revision}.
- Trained by reinforcement learning with Nightshift on {markdown(", ".join(record.environments))}.
- Engine {record.engine}, {markdown(record.hardware)}, steps: {evaluation.weights.step}.
- Score on the validation split, which chose among experiments: {evaluation.eval_score:.4f} (standard error over its
  examples: {evaluation.eval_stderr:.4f}).
- {markdown(certificate, 2000)}

Changes to the baseline's train.toml:

{changes}
"""
