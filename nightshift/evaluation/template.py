"""Environments of one's own: the skeleton that `new environment` writes, and what `doctor --environment` looks at."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

from nightshift.config.rules import RULES_NAME
from nightshift.config.rules_toml import NAME, environments_named
from nightshift.errors import UsageError
from nightshift.evaluation.environment import load
from nightshift.text import clean

NUM_LOOKED_AT = 20
_SKELETON = "docs/environment"


def create(root: Path, name: str) -> list[str]:
    """Write environments/NAME, which trains as it is, with its test; what to do next. UsageError for a name that is
    none, or taken."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{json.dumps(name)} is no name of an environment", "Give up to 40 of a-z, 0-9 and _.")
    target, skeleton = root / "environments" / name, root / _SKELETON
    if target.exists():
        raise UsageError(f"{target} is there already", "Give another name.")
    package = target / f"nightshift_{name}"
    package.mkdir(parents=True)
    places = {"pyproject.toml": target, "test.py": target / f"test_{name}.py"}
    for path in sorted(skeleton.iterdir()):
        place = places.get(path.name, package)
        to = place if place.suffix == ".py" else place / path.name
        to.write_text(path.read_text().replace("NAME", name))
    (package / "py.typed").touch()
    return [
        f"wrote environments/{name}: data.py asks, scoring.py pays, taskset.py is for prime-rl",
        f"look at it: uv run nightshift doctor --environment {name}",
        f'choose it in {RULES_NAME}: environments = ["{name}"]',
        "commit it, and on a branch of its own (git switch -c autoresearch/first) begin: uv run run.py",
    ]


def look(root: Path, name: str, clock: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """A line each: its sets, an example, what a reward costs and pays. NightshiftError where it is refused."""
    (rules,) = environments_named(root, [name])
    (environment,) = load(root, [rules])
    scorer, began = environment.scorer, clock()
    try:
        examples = environment.examples("train")
        seconds = clock() - began
        sets = f"{len(examples)} examples to train on, {rules.num_selection} decide, as many are sealed"
        yield f"{name}: {sets}; loaded in {seconds:.1f} s"
        if rules.taskset is not None:
            yield f"code: {rules.taskset.place(root)}, with {', '.join(rules.versions)}"
        looked_at = examples[:NUM_LOOKED_AT]
        chat = environment.episode(looked_at[0]).ask() or ()
        yield from (f"{message['role']}: {clean(message['content'], 300)}" for message in chat)
        said_of_each = {"an empty text": [""] * len(looked_at), "its answer": [e.answer for e in looked_at]}
        if rules.is_game:  # of which the answer is what the opening is worth
            del said_of_each["its answer"]
        for what, texts in said_of_each.items():
            scores, began = [], clock()
            for example, text in zip(looked_at, texts, strict=True):
                episodes = environment.episodes(example)
                for episode in episodes:
                    while episode.ask() is not None:
                        episode.answer(text)
                scores.append(fmean(episode.score() for episode in episodes))
            each = 1000 * (clock() - began) / len(scores)
            said = f" ({clean(texts[0], 60)!r})" if texts[0] else " (the task knows none)" * (what == "its answer")
            yield f"{what}{said}: score {fmean(scores):.3f} over {len(scores)} tasks, {each:.1f} ms each"
        if scorer and (told := scorer.failures()):
            yield f"PROBLEM: {told}"
    finally:
        if scorer:
            scorer.close()
