"""A study of Optuna in a journal file, which its loader and optuna-dashboard open.

A trial's value is its eval_score, which was measured; what is believed of it stands in its attributes. Parameters are
the keys that a train.toml of the campaign writes: numbers in their box (agents/space.py), widened to what was tried,
anything else among the values that were. A crash is FAIL.
"""

import math
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from nightshift.agents.space import BOXES, Scale
from nightshift.campaign.records import Record
from nightshift.config.train_toml import spelled
from nightshift.config.values import Value
from nightshift.report.data import Span, span
from nightshift.report.export.story import Row, Story, scores
from nightshift.text import clean

_STATES = {"crashed": TrialState.FAIL, "interrupted": TrialState.FAIL, "undecided": TrialState.RUNNING}
_MEANING = "eval_score: greedy pass@1 of the final weights on the selection set, 0..1"


def as_journal(story: Story) -> bytes:
    """The journal's bytes: one study, by the branch and the rules' hash."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="nightshift-") as folder:
        path = Path(folder) / "journal"
        storage = JournalStorage(JournalFileBackend(str(path)))
        name = clean(f"{story.shown.branch or 'detached'} {story.shown.rules_hash}")
        study = optuna.create_study(storage=storage, study_name=name, direction="maximize")
        study.set_user_attr("value", _MEANING)
        study.set_user_attr("rules", clean(story.shown.rules_hash))
        distributions = _distributions(story)
        for record, each in story.rows():
            study.add_trial(_trial(story, record, each, distributions))
        return path.read_bytes()


def _trial(story: Story, record: Record, each: Row, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
    config = story.configs.get(each["number"])
    resolved = config.resolved if config else {}
    params = {path: _param(distributions[path], resolved[path]) for path in distributions if path in resolved}
    began, ended = (moment.astimezone().replace(tzinfo=None) for moment in _span(each))  # Optuna's are local and naive
    state = _STATES.get(each["outcome"], TrialState.COMPLETE)
    value = each["eval_score"] if state is TrialState.COMPLETE else None
    if state is TrialState.COMPLETE and value is None:
        state = TrialState.FAIL
    curve = record.result.curve if record.result else ()
    texts = {"description": each["description"], "why": each["why"], "outcome": each["outcome"], "since": each["since"]}
    texts |= {"failure": each["failure"], "proposer": each["proposer"], "changes": each["changes"]}
    texts |= {"kept": each["kept"], "rider": each["rider"]}
    attributes: dict[str, Any] = {"experiment": each["number"], "parent": each["parent"], **scores(record, each)}
    return FrozenTrial(
        number=0,
        trial_id=0,
        state=state,
        value=value,
        datetime_start=began,
        datetime_complete=None if state is TrialState.RUNNING else ended,
        params=params,
        distributions={path: distributions[path] for path in params},
        user_attrs=attributes | {name: clean(text) for name, text in texts.items() if text},
        system_attrs={},
        intermediate_values={at: reward for at, reward in enumerate(curve) if reward is not None},
    )


def _span(each: Row) -> Span:
    """When it ran; at the epoch where its record does not tell."""
    return span(each["started"], each["total_seconds"]) or (datetime.fromtimestamp(0, UTC),) * 2


def _distributions(story: Story) -> dict[str, BaseDistribution]:
    """By key: one for all trials of the study."""
    configs = story.configs.values()
    written = dict.fromkeys(path for config in configs for path in config.values)
    tried = {path: [config.resolved[path] for config in configs if path in config.resolved] for path in written}
    return {path: _distribution(path, values) for path, values in tried.items() if values}


def _distribution(path: str, values: Sequence[Value]) -> BaseDistribution:
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        return CategoricalDistribution([*dict.fromkeys(map(_choice, values))])
    box = BOXES.get(path)
    is_box = box is not None and box.scale is not Scale.CHOICE
    bounds = [*numbers, *([box.low, box.high] if box is not None and is_box else [])]
    low, high = min(bounds), max(bounds)
    is_log = box is not None and box.scale in (Scale.LOG, Scale.POWER_OF_TWO) and low > 0
    if all(isinstance(value, int) for value in numbers):
        return IntDistribution(math.floor(low), math.ceil(high), log=is_log and low >= 1)
    return FloatDistribution(float(low), float(high), log=is_log)


def _choice(value: Value) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else spelled(value)


def _param(distribution: BaseDistribution, value: Value) -> Any:
    return _choice(value) if isinstance(distribution, CategoricalDistribution) else value
