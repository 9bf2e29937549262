"""Environments of one's own: the skeleton that `new environment` writes, and what `doctor --environment` looks at."""

import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from nightshift.config.rules import RULES_NAME, EnvironmentRules
from nightshift.config.rules_toml import NAME, environments_named, refuse_unused_weights
from nightshift.errors import EngineError, Interrupted, NightshiftError, UsageError
from nightshift.evaluation.environment import load
from nightshift.text import clean

NUM_LOOKED_AT = 20
REWARD_SECONDS = 30.0
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
    """A line each: its sets, an example, what a reward costs and pays.

    Raises:
        NightshiftError: the environment is refused. The line names the file and the line of a fault in its code.
    """
    refuse_unused_weights(root)
    (rules,) = environments_named(root, [name])
    try:
        yield from _look(root, rules, clock)
    except Interrupted:
        raise
    except (Exception, SystemExit, _TooLong) as error:
        place = _place(error, root)
        if place is None and isinstance(error, _TooLong):  # the package runs in a process of its own
            place = str(rules.taskset.place(root) if rules.taskset else root / rules.folders[0] / rules.package)
        if place is None:
            raise
        what = error.cause if isinstance(error, NightshiftError) else f"{type(error).__name__}: {error}"
        what = f"no score within {REWARD_SECONDS:g} s" if isinstance(error, _TooLong) else what
        raise EngineError(f"{place}: {clean(what, 300)}", "Mend it there.") from error


class _TooLong(BaseException):
    """A reward hangs. No Exception: code that catches every Exception does not catch it."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise _TooLong in what runs inside after so many seconds. Main thread only."""

    def ring(number: int, frame: object) -> None:
        raise _TooLong

    handler, timer = signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _place(error: BaseException, root: Path) -> str | None:
    """`FILE:LINE` of the innermost code of an environment that an error went through; None for other code."""
    origin = error.__cause__ or error
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(origin.__traceback__)]
    if isinstance(origin, SyntaxError):
        places.append((origin.filename or "", origin.lineno))
    top = root / "environments"
    inside = [f"{Path(file).relative_to(root)}:{line}" for file, line in places if Path(file).is_relative_to(top)]
    return inside[-1] if inside else None


def _look(root: Path, rules: EnvironmentRules, clock: Callable[[], float]) -> Iterator[str]:
    (environment,) = load(root, [rules])
    scorer, began = environment.scorer, clock()
    try:
        examples = environment.examples("train")
        seconds = clock() - began
        sets = f"{len(examples)} examples to train on, {rules.num_selection} decide, as many are sealed"
        yield f"{rules.name}: {sets}; loaded in {seconds:.1f} s"
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
                with _at_most(REWARD_SECONDS):
                    episodes = environment.episodes(example)
                    for episode in episodes:
                        while episode.ask() is not None:
                            episode.answer(text)
                    scores.append(fmean(episode.score() for episode in episodes))
                if scorer and scorer.num_failed and clock() - began > REWARD_SECONDS:
                    raise EngineError(scorer.failures(), "Mend it there.")
            each = 1000 * (clock() - began) / len(scores)
            said = f" ({clean(texts[0], 60)!r})" if texts[0] else " (the task knows none)" * (what == "its answer")
            yield f"{what}{said}: score {fmean(scores):.3f} over {len(scores)} tasks, {each:.1f} ms each"
        if scorer and (told := scorer.failures()):
            yield f"PROBLEM: {told}"
    finally:
        if scorer:
            scorer.close()
