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

from nightshift.campaign.models import MODEL_NAME
from nightshift.campaign.next_run import settings_of
from nightshift.campaign.records import Change, Record
from nightshift.config.train_toml import spelled
from nightshift.errors import EngineError, UsageError
from nightshift.experiment.certify import read_comparisons
from nightshift.files import nesting_limit, open_regular, whole_folder, write_atomically
from nightshift.report.data import baseline_and_incumbent
from nightshift.report.export.story import Row, Story
from nightshift.report.markdown import markdown
from nightshift.text import clean

CARD_NAME = "README.md"
_KINDS = (".safetensors", ".json", ".jinja", ".txt", ".model")  # weights, configuration, tokenizers; no code, no pickle
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_VOCABULARIES = ("tokenizer.json", "vocab.json")  # in which any word may stand
_CODE = ("auto_map", "custom_pipelines", "custom_generate")  # name code that transformers would fetch and run
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def copy_model(story: Story, number: int | None, target: Path) -> Path:
    """Write the model of an experiment to `target`; its path. Where `number` is None: of the last run of exactly the
    incumbent's config, or else of the last keep that stands.

    The folder appears whole or not at all. UsageError where it holds something already, or the weights are gone;
    EngineError where they are not those that were scored, or what lies beside them names code.
    """
    record, each = _chosen(story, number)
    source = _source(story, record)
    with whole_folder(target) as partial:
        names = _copy(source, partial)
        _check(partial, record, source)
        _refuse_code(partial, names, record)
        text = card(story, record, each)
        write_atomically(partial / CARD_NAME, text.encode(errors="replace"))
    return target


def _chosen(story: Story, number: int | None) -> tuple[Record, Row]:
    campaign = story.shown.campaign
    best = campaign.incumbent_run or campaign.parent
    if number is None and best is None:
        raise UsageError("the campaign has no incumbent yet", "Run its baseline: uv run run.py.")
    wanted = number if number is not None else best.number if best else 0
    for record, each in story.rows():
        if record.number == wanted:
            return record, each
    raise UsageError(
        f"experiment {wanted:04d} is none of {story.shown.branch or 'a detached HEAD'}", "Name its --branch."
    )


def _source(story: Story, record: Record) -> Path:
    """Where its model lies: of an adopted baseline with the experiment whose result it took over."""
    folder = story.ledger.files_dir(record) / MODEL_NAME
    if folder.is_symlink() or folder.parent.is_symlink() or not folder.is_dir():
        there = [f"{r.number:04d}" for r in story.shown.records
                 if (story.ledger.files_dir(r) / MODEL_NAME).is_dir()]  # fmt: skip
        have = f"Those of {', '.join(there)} are here: --experiment N; or train" if there else "Train"
        raise UsageError(
            f"the weights of experiment {record.number:04d} are gone: {folder} is no folder",
            f"{have} its train.toml again, on a branch of its own: of models beyond 20 GB the oldest go.",
        )
    return folder


def _copy(source: Path, target: Path) -> list[str]:
    """Regular files of the known kinds, at the top of the folder; their names."""
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
    return names


def _check(folder: Path, record: Record, source: Path) -> None:
    """EngineError where the weights that were copied are not those that were scored."""
    from nightshift.engines.prime_rl.weights import check_weights, whole_files

    recorded = record.evaluation.weights.sha256 if record.evaluation else None
    found = {check_weights(folder)}  # of one file or several, as `sha256sum` would
    if (names := whole_files(folder)) == ["model.safetensors"]:  # by whose own an engine may know it
        with (folder / names[0]).open("rb") as file:
            found.add(hashlib.file_digest(file, "sha256").hexdigest())
    if recorded not in found:
        raise EngineError(
            f"the weights in {source} are not those that experiment {record.number:04d} was scored by "
            f"(sha256 {min(found)[:12]}, recorded {str(recorded)[:12]})",
            "Train its train.toml again, on a branch of its own.",
        )


def _refuse_code(folder: Path, names: list[str], record: Record) -> None:
    """EngineError where a file beside the weights names code that transformers would fetch and run."""
    for name in names:
        is_configuration = name.endswith(".json") and name not in _VOCABULARIES
        keys = _keys((folder / name).read_bytes()) if is_configuration else set()
        if code := next((word for word in _CODE if word in keys), None):
            cause = f"{name} of experiment {record.number:04d} has {code}: transformers would run that code"
            raise EngineError(cause, "Train its train.toml again, on a branch of its own.")


def _keys(data: bytes) -> set[str]:
    """All keys of a JSON document, at any depth; none of what is no JSON, which nothing reads."""
    keys = set[str]()
    with suppress(ValueError), nesting_limit():
        json.loads(data, object_pairs_hook=lambda pairs: keys.update(dict(pairs)))
    return keys


def card(story: Story, record: Record, each: Row) -> str:
    """Return the card. It contains no free text and no path of this machine: the settings are those that the allow-list
    reads from train.toml, and a base model outside of the checkout and of the hub has no name."""
    rules, evaluation = story.rules(record), record.evaluation
    weights = evaluation.weights if evaluation else None
    base = "not recorded" if rules is None else rules.model if _HUB_NAME.fullmatch(rules.model) else "a local folder"
    revision = clean(rules.model_revision or "", 60) if rules else ""
    front = [f"base_model: {base}"] if revision and _HUB_NAME.fullmatch(base) else []
    seconds = f"{record.budget_seconds:g} s of training" if record.budget_seconds else "not recorded"
    budget = f"{rules.budget_text} of training" if rules else seconds
    baseline = story.shown.campaign.baseline
    commit = baseline.commit if baseline else None  # where the campaign began
    decoding = f", greedy, at most {rules.decoding.max_completion_tokens} tokens" if rules else ""
    rows = [
        ("base model", f"{base}{f' at {revision}' if revision else ''}"),
        ("environments", ", ".join(record.environments)),
        ("engine", f"{record.engine}, rules {record.rules_name} {record.rules_hash}"),
        ("seed", str(record.result.seed) if record.result else "not recorded"),
        ("steps", str(weights.step) if weights else "not recorded"),
        ("budget", budget),
        ("hardware", record.hardware),
        ("weights, sha256", weights.sha256 if weights else "not recorded"),
        ("experiment", f"{record.number:04d} of {record.branch or 'no branch'}, {each['outcome']}"),
        ("changes", each["changes"] or "none"),
        ("code", f"commit {commit}" if commit else "not recorded"),
    ]  # fmt: skip
    score = f"{evaluation.eval_score:.4f} of these weights" if evaluation else "not measured"

    return "\n".join([
        "---", "library_name: transformers", "pipeline_tag: text-generation",
        *front, "---", "", f"# Experiment {record.number:04d} of {markdown(story.tag)}", "",
        "Trained by reinforcement learning with Nightshift, which measured the final weights: the ones here.", "",
        "## How it was made", "", "| | |", "|---|---|", *(f"| {name} | {markdown(text)} |" for name, text in rows), "",
        "The keys that its train.toml sets:", "", *_settings(story, record), "",
        "## What is known of it", "",
        f"- eval_score {score}: the share of the validation split that is answered right (0 to 1){decoding}. "
        "Experiments were chosen on that set, so the score of the best of them is flattered.",
        f"- {markdown(against_incumbent(story, record), 2000)}",
        f"- {certified(story, record)}", "",
    ])  # fmt: skip


def against_incumbent(story: Story, record: Record) -> str:
    campaign = story.shown.campaign
    own, kept = ({settings_of(change): change for change in changes}
                 for changes in (record.run.changes, campaign.kept))  # fmt: skip
    more = [f"{change.name} ({_role(change, record)})" for key, change in own.items() if key not in kept]
    less = [change.name for key, change in kept.items() if key not in own]
    parts = [f"its run also held {', '.join(more)}"] if more else []
    parts += [f"its run did not hold {', '.join(less)}, which the incumbent has"] if less else []
    held = (
        "Its run held exactly the incumbent's changes" if not parts else f"It is not the incumbent: {'; '.join(parts)}"
    )
    return f"{held}. The incumbent is the baseline with {', '.join(c.name for c in campaign.kept) or 'no change'}."


def _role(change: Change, record: Record) -> str:
    if change == record.run.rider:
        return "discarded, measured again"
    return "not kept" if change == record.run.new and not record.is_keep else "not kept any more"


def certified(story: Story, record: Record) -> str:
    """What is certified, with its interval; else that nothing is, and what is believed."""
    campaign, configs = story.shown.campaign, baseline_and_incumbent(story.ledger, story.shown.campaign)
    if not campaign.kept or campaign.standing is None or configs is None:
        return "Not certified: its campaign has no gain."
    if record.config_hash != configs[1].hash:
        return "Not certified: its config is not the incumbent's."
    wanted = "test", record.branch, record.rules_hash, *(config.hash for config in configs)
    for comparison in reversed(read_comparisons(story.ledger)):
        plan = comparison.plan
        if (plan.split, plan.branch, plan.rules_hash, plan.configs["baseline"], plan.configs["incumbent"]) == wanted:
            gain = _gain(comparison.estimate.difference, comparison.estimate.interval)
            verdict = comparison.verdict
            return f"Certified, {verdict}: its config gains {gain}, by fresh runs of both on the test split."
    gain = _gain(campaign.standing.gain, campaign.standing.gain_interval)
    return f"Not certified. Believed of its config: {gain}; nothing was measured on the test split."


def _gain(difference: float, interval: tuple[float, float]) -> str:
    low, high = (100 * min(max(end, -1.0), 1.0) for end in interval)
    return f"{100 * difference:+.1f} pp over the baseline, 95 % interval {low:+.1f} to {high:+.1f} pp"


def _settings(story: Story, record: Record) -> list[str]:
    """Return the lines of a Markdown code block."""
    config = story.configs.get(record.number)
    if config is None:
        return ["    (the file is gone)"]
    return [f"    {path} = {spelled(value)}" for path, value in config.values.items()]
