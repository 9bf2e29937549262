"""Your own environments: the skeleton that `new environment` writes, and the checks of `doctor --environment`."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from nightshift.config.rules import RULES_NAME, EnvironmentRules
from nightshift.config.rules_toml import NAME, environments_named, refuse_unused_weights
from nightshift.errors import EngineError, Interrupted, UsageError
from nightshift.evaluation.environment import load
from nightshift.evaluation.verifiers_environment import frame_of, place_of
from nightshift.text import clean

NUM_EXAMPLES = 20
REWARD_SECONDS = 30.0
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
    refuse_unused_weights(root)
    (rules,) = environments_named(root, [name])
    try:
        yield from _look(root, rules, clock)
    except _TooLong as error:
        place = place_of(frame_of(error))
        if not place:  # the package runs in its own process
            place = f"{rules.taskset.place(root) if rules.taskset else root / rules.folders[0] / rules.package}: "
        raise EngineError(f"{place}no score within {REWARD_SECONDS:g} s", "Mend it there.") from error
    except Interrupted:
        raise
    except Exception as error:
        place = place_of(frame_of(error.__cause__ or error))
        if not place or str(error).startswith(place):
            raise
        raise EngineError(f"{place}{clean(str(error), 300)}", "Mend it there.") from error


class _TooLong(BaseException):
    """A reward hangs. It is no Exception, so that code that catches every Exception does not catch it."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise _TooLong in the code inside after so many seconds. Main thread only."""

    def ring(number: int, frame: object) -> None:
        raise _TooLong

    handler, timer = signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _look(root: Path, rules: EnvironmentRules, clock: Callable[[], float]) -> Iterator[str]:
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
            scores, began = [], clock()
            for example, text in zip(examples, texts, strict=True):
                with _at_most(REWARD_SECONDS):
                    episodes = environment.episodes(example)
                    for episode in episodes:
                        while episode.ask() is not None:
                            episode.answer(text)
                    scores.append(fmean(episode.score() for episode in episodes))
                if scorer and scorer.num_failed and clock() - began > REWARD_SECONDS:
                    raise EngineError(scorer.failures(), "Mend it there.")
            milliseconds = 1000 * (clock() - began) / len(scores)
            shown = f" ({clean(texts[0], 60)!r})" if texts[0] else " (the task knows none)" * (what == "its answer")
            yield f"{what}{shown}: score {fmean(scores):.3f} over {len(scores)} tasks, {milliseconds:.1f} ms each"
        if scorer and (failures := scorer.failures()):
            yield f"PROBLEM: {failures}"
    finally:
        if scorer:
            scorer.close()
