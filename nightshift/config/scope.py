"""The scope of a direction: the keys and tables of train.toml that experiments may change.

The first line of a direction, or --only, sets the scope: `Only: trainer.scheduler, trainer.optim.lr`.
"""

import re
from collections.abc import Iterable, Sequence

from nightshift.config.allowlist import ANY, find_key, is_inner, suggest, value_text
from nightshift.config.train_toml import Config
from nightshift.errors import UsageError, listed

LABEL = "Only"
# Also in a list item, in bold, or with the colon of East Asian keyboards.
_LINE = re.compile(rf"[\s>*`_-]*{LABEL}[*`_]*\s*[:\uff1a][*`_]*(.*)", re.IGNORECASE)
_SCHEDULE = "trainer.scheduler.type"
_LENGTHS = ("max_steps", "trainer.scheduler.warmup_steps", "trainer.scheduler.decay_steps")  # belong to the schedule


def scope_of(direction: str) -> tuple[str, ...]:
    """Return the keys and tables in the first line of a direction; () if every key may change."""
    line = _LINE.fullmatch(direction.partition("\n")[0])
    return tuple(filter(None, (name.strip(" `*.") for name in line[1].split(",")))) if line else ()


def require_valid(direction: str) -> None:
    """Raise UsageError for a scope without names, and for a name that is neither an open key nor a table of such."""
    if _LINE.fullmatch(direction.partition("\n")[0]) and not scope_of(direction):
        fix = f"Write the keys in the same line: {LABEL}: trainer.optim.lr, max_steps."
        raise UsageError(f"{LABEL}: names no key", fix)
    for name in scope_of(direction):
        if ANY in name or (find_key(name) is None and not is_inner(name)):
            keys = suggest(tuple(name.split(".")))
            fix = f"Did you mean {' or '.join(keys)}?" if keys else "uv run run.py --keys lists the keys and tables."
            raise UsageError(f"{LABEL}: {value_text(name)} is not an open key or table of train.toml", fix)


def is_within(scope: Sequence[str], key: str) -> bool:
    """Return whether a key is in the scope. A schedule's type includes its numbers of steps."""
    is_named = any(f"{key}.".startswith(f"{name}.") for name in scope)
    return not scope or is_named or (key in _LENGTHS and is_within(scope, _SCHEDULE))


def require_within(scope: Sequence[str], keys: Iterable[str], config: Config) -> None:
    """Raise UsageError if a changed key is outside the scope. A key that does not apply in `config` may change."""
    outside = [key for key in keys if key in config.resolved and not is_within(scope, key)]
    if outside:
        cause = f"outside the user's direction: {listed(outside)} may not change"
        raise UsageError(cause, f"Change keys of {', '.join(scope)} only.")
