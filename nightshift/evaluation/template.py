"""Your own environments: the skeleton that `new environment` writes, and the checks of `doctor --environment`."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

from nightshift.config.rules import RULES_NAME
from nightshift.config.rules_toml import NAME, environments_named
from nightshift.errors import UsageError
from nightshift.evaluation.environment import Environment, Example, load
from nightshift.text import clean

NUM_EXAMPLES = 20
_SKELETON = "docs/environment"


def create(root: Path, name: str) -> list[str]:
    """Write environments/NAME, which can be trained as it is, with its test. Return lines on what to do next."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{json.dumps(name)} is no name of an environment", "Give up to 40 of a-z, 0-9 and _.")
    target, skeleton = root / "environments" / name, root / _SKELETON
    if target.exists():
        raise UsageError(f"{target} is there already", "Give another name.")
    package = target / f"nightshift_{name}"
    package.mkdir(parents=True)
    elsewhere = {"pyproject.toml": target / "pyproject.toml", "test.py": target / f"test_{name}.py"}
    for path in sorted(skeleton.iterdir()):
        elsewhere.get(path.name, package / path.name).write_text(path.read_text().replace("NAME", name))
    (package / "py.typed").touch()
    return [
        f"wrote environments/{name}: data.py asks, scoring.py pays, taskset.py is for prime-rl",
        f"look at it: uv run nightshift doctor --environment {name}",
        f'choose it in {RULES_NAME}: environments = ["{name}"]',
        f"begin a campaign on a branch that contains it: uv run run.py --branch {name}",
    ]


def look(root: Path, name: str, clock: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """Yield lines on splits, an example, and what rewards cost and pay. NightshiftError names a fault and its place."""
    (rules,) = environments_named(root, [name])
    (environment,) = load(root, [rules])
    scorer, began = environment.scorer, clock()
    try:
        examples = environment.examples("train")
        seconds, num = clock() - began, rules.num_validation
        sizes = f"{len(examples)} training examples, {num} for validation, {num} for test"
        yield f"{rules.name}: {sizes}; loaded in {seconds:.1f} s"
        if rules.taskset is not None:
            yield f"code: {rules.taskset.place(root)}, with {', '.join(rules.versions)}"
        if scorer:
            yield from (f"note: {note}" for note in scorer.notes)
        examples = examples[:NUM_EXAMPLES]
        chat = environment.episode(examples[0]).ask() or ()
        yield from (f"{message['role']}: {clean(message['content'], 300)}" for message in chat)
        texts_of = {"an empty text": [""] * len(examples), "its answer": [example.answer for example in examples]}
        if rules.is_game:  # the answer of an opening is its value, no move
            del texts_of["its answer"]
        for what, texts in texts_of.items():
            began = clock()
            scores = [_score(environment, example, text) for example, text in zip(examples, texts, strict=True)]
            milliseconds = 1000 * (clock() - began) / len(scores)
            shown = f" ({clean(texts[0], 60)!r})" if texts[0] else " (the task knows none)" * (what == "its answer")
            yield f"{what}{shown}: score {fmean(scores):.3f} over {len(scores)} tasks, {milliseconds:.1f} ms each"
        if scorer and (failures := scorer.failures()):
            yield f"PROBLEM: {failures}"
    finally:
        if scorer:
            scorer.close()


def _score(environment: Environment, example: Example, text: str) -> float:
    """Return the score of an example whose every question is answered by `text`."""
    episodes = environment.episodes(example)
    for episode in episodes:
        while episode.ask() is not None:
            episode.answer(text)
    return fmean(episode.score() for episode in episodes)
