"""`nightshift export --to model`: an experiment's weights as a folder that transformers loads, with a card.

The folder in runs/ lies where agents write: regular files of known kinds are copied, never code, and the weights count
only where they are, byte for byte, those that were scored.
"""

import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from nightshift.campaign.records import MODEL_NAME, Record
from nightshift.config.rules_toml import HUB_NAME
from nightshift.config.train_toml import diff
from nightshift.errors import EngineError, UsageError
from nightshift.files import nesting_limit, open_regular, whole_folder, write_atomically
from nightshift.report.data import Story, gather
from nightshift.report.markdown import markdown
from nightshift.report.text import certificate_line

_KINDS = (".safetensors", ".json", ".jinja", ".txt", ".model")  # weights, configuration, tokenizers; no code, no pickle
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_VOCABULARIES = ("tokenizer.json", "vocab.json")  # in which any word may stand
_CODE = ("auto_map", "custom_pipelines", "custom_generate")  # name code that transformers would fetch and run
_AGAIN = "Train its train.toml again, on a branch of its own."


def copy_model(story: Story, number: int | None, target: Path) -> Path:
    """Write the model of an experiment to `target`; its path. Where `number` is None: of the last run of exactly the
    incumbent's config, or else of the last keep that stands.

    The folder appears whole or not at all. UsageError where it holds something already, or the weights are gone;
    EngineError where they are not those that were scored, or what lies beside them names code.
    """
    best = story.campaign.incumbent_run or story.campaign.parent
    if number is None and best is None:
        raise UsageError("the campaign has no incumbent yet", "Run its baseline: uv run run.py.")
    record = next((r for r in story.records if r.number == number), best if number is None else None)
    if record is None:
        cause = f"experiment {number:04d} is none of {story.branch}"
        raise UsageError(cause, "Name its --branch.")
    source = story.ledger.run_dir(record.number) / MODEL_NAME
    if source.is_symlink() or source.parent.is_symlink() or not source.is_dir():
        raise UsageError(f"the weights of experiment {record.number:04d} are gone: {source} is no folder", _AGAIN)
    with whole_folder(target) as partial:
        _copy(source, partial)
        _check(partial, record, source)
        write_atomically(partial / "README.md", card(story, record).encode(errors="replace"))
    return target


def _copy(source: Path, target: Path) -> None:
    """Copy regular files of the known kinds, at the top of the folder. EngineError where one names code that
    transformers would fetch and run."""
    with os.scandir(source) as entries:
        names = sorted(e.name for e in entries if _NAME.fullmatch(e.name) and e.name.endswith(_KINDS))
    for name in names:
        try:
            file = open_regular(source / name)
        except OSError as error:
            cause = f"{source / name} is no part of a model: {error.strerror or error}"
            raise EngineError(cause, "Take it out of that folder.") from None
        with file, (target / name).open("xb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
        is_configuration = name.endswith(".json") and name not in _VOCABULARIES
        keys = _keys((target / name).read_bytes()) if is_configuration else set()
        if code := next((word for word in _CODE if word in keys), None):
            raise EngineError(f"{source / name} has {code}: transformers would run that code", _AGAIN)


def _keys(data: bytes) -> set[str]:
    """All keys of a JSON document, at any depth; none of what is no JSON, which nothing reads."""
    keys = set[str]()
    with suppress(ValueError), nesting_limit():
        json.loads(data, object_pairs_hook=lambda pairs: keys.update(dict(pairs)))
    return keys


def _check(folder: Path, record: Record, source: Path) -> None:
    """EngineError where the weights that were copied are not those that were scored."""
    from nightshift.engines.prime_rl.weights import check_weights, whole_files

    recorded = record.evaluation.weights.sha256 if record.evaluation else None
    found = {check_weights(folder)}  # of one file or several, as `sha256sum` would
    if (names := whole_files(folder)) == ["model.safetensors"]:  # by whose own an engine may know it
        with (folder / names[0]).open("rb") as file:
            found.add(hashlib.file_digest(file, "sha256").hexdigest())
    if recorded not in found:
        scored = f"those that experiment {record.number:04d} was scored by"
        hashes = f"sha256 {min(found)[:12]}, recorded {str(recorded)[:12]}"
        raise EngineError(f"the weights in {source} are not {scored} ({hashes})", _AGAIN)


def card(story: Story, record: Record) -> str:
    """Return the card. It contains no free text and no path of this machine: the changes are of keys on the
    allow-list, and a base model outside of the checkout and of the hub has no name."""
    rules, evaluation = story.rules(record), record.evaluation
    base = "not recorded" if rules is None else rules.model if HUB_NAME.fullmatch(rules.model) else "a local folder"
    revision = f" at {rules.model_revision}" if rules and rules.model_revision else ""
    score = steps = "not measured"
    if evaluation is not None:
        low, high = (evaluation.eval_score + sign * 1.96 * evaluation.eval_stderr for sign in (-1, 1))
        score = f"{evaluation.eval_score:.4f}, 95 % interval over its examples {max(low, 0):.4f} to {min(high, 1):.4f}"
        steps = str(evaluation.weights.step)
    configs, config = story.campaign.configs, story.configs.get(record.number)
    changes = diff(configs[0], config) if configs and config else None
    lines = "not recorded" if changes is None else "\n".join(f"    {change.line}" for change in changes) or "none"
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
---

# Experiment {record.number:04d} of {markdown(story.tag)}

- Base model: {markdown(base + revision)}. Its licence holds; it is not recorded here.
- Trained by reinforcement learning with Nightshift on {markdown(", ".join(record.environments))}.
- Engine {record.engine}, rules {markdown(record.rules_name)}, {markdown(record.hardware)}, steps: {steps}.
- Score on the validation split, by which experiments were chosen: {score}.
- {certified(story, record)}
- Load it with AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained of transformers.

Changes to the baseline's train.toml:

{lines}
"""


def certified(story: Story, record: Record) -> str:
    """What is certified, with its interval; else that nothing is."""
    page, configs = gather(story.ledger, story.branch), story.campaign.configs
    if page.obsolete or configs is None or record.config_hash != configs[1].hash:
        return "Not certified: its config was not compared with the baseline's on the test split."
    return markdown(certificate_line(page))
