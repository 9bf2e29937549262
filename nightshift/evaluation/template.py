"""The skeleton that `new environment` writes, and the checks of `doctor --environment`."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from nightshift.config.rules import RULES_NAME
from nightshift.config.rules_toml import NAME, environments_named
from nightshift.errors import UsageError
from nightshift.evaluation.environment import Environment, Example, load
from nightshift.text import clean

NUM_EXAMPLES = 20
_SKELETON, _SKELETON_TURNS = "docs/environment", "docs/environment_turns"
_FIX = "Correct the code of the environment, then run this again."


def create(root: Path, name: str, has_turns: bool = False) -> list[str]:
    """Write environments/NAME, which can be trained without a change, with a test. Return lines with the next steps.

    `has_turns`: a verifiers environment of two turns, for prime-rl.
    """
    if not NAME.fullmatch(name):
        raise UsageError(f"{json.dumps(name)} is not a valid name", "Use up to 40 of a-z, 0-9 and _.")
    target, skeleton = root / "environments" / name, root / (_SKELETON_TURNS if has_turns else _SKELETON)
    if target.exists():
        raise UsageError(f"{target} exists", "Use another name.")
    package = target / (f"{name}_env" if has_turns else f"nightshift_{name}")
    package.mkdir(parents=True)
    elsewhere = {"pyproject.toml": target / "pyproject.toml", "test.py": target / f"test_{name}.py"}
    for path in sorted(skeleton.iterdir()):
        elsewhere.get(path.name, package / path.name).write_text(path.read_text().replace("NAME", name))
    (package / "py.typed").touch()
    files, engine = ": data.py makes the questions, scoring.py the scores, and prime-rl uses taskset.py", ""
    choice = f'choose the environment in {RULES_NAME}: environments = ["{name}"]'
    if has_turns:
        files = f"/{name}_env: the taskset contains the tasks, the Env plays the episodes"
        engine = " --engine prime-rl"
        choice += f'\n[environment.{name}]\npackage = "environments/{name}"\nnum_validation = 200\nmax_turns = 2'
    return [
        f"wrote environments/{name}{files}",
        choice,
        f"check the environment: uv run nightshift doctor --environment {name}",
        f"commit the folder, then start a campaign: uv run run.py{engine} --branch {name}",
    ]


def look(root: Path, name: str) -> Iterator[str]:
    """Yield lines about splits, an example, and the scores and times of rewards. NightshiftError for an error in it."""
    (rules,) = environments_named(root, [name])
    (environment,) = load(root, [rules])
    scorer, began, num = environment.scorer, time.monotonic(), rules.num_validation
    try:
        examples = environment.examples("train")
        sizes = f"{len(examples)} training examples, {num} for validation, {num} for test"
        yield f"{rules.name}: {sizes}; loaded in {time.monotonic() - began:.1f} s"
        if rules.taskset is not None and rules.taskset.max_turns > 1:  # its own test plays episodes
            return
        examples = examples[:NUM_EXAMPLES]
        chat = environment.episode(examples[0]).ask() or ()
        yield from (f"{message['role']}: {clean(message['content'], 300)}" for message in chat)
        texts_of = {"an empty text": [""] * len(examples)}
        if not rules.is_game:  # the answer of an opening is its value, not a move
            texts_of["its answer"] = [example.answer for example in examples]
        for label, texts in texts_of.items():
            began = time.monotonic()
            scores = [_score(environment, example, text) for example, text in zip(examples, texts, strict=True)]
            time_each = f"{1000 * (time.monotonic() - began) / len(scores):.1f} ms each"
            yield f"{label} ({clean(texts[0], 60)!r}): score {fmean(scores):.3f} over {len(scores)} tasks, {time_each}"
        if scorer and (failures := scorer.failures()):
            raise UsageError(f"{name}: {failures}", _FIX)
    finally:
        if scorer:
            scorer.close()


def _score(environment: Environment, example: Example, text: str) -> float:
    """Return the score of an example if `text` is the answer to every question."""
    episodes = environment.episodes(example)
    for episode in episodes:
        while episode.ask() is not None:
            episode.answer(text)
    return fmean(episode.score() for episode in episodes)
