"""The errors of prime-rl's validation of a config (validate.py), as one error that names the line of train.toml."""

from collections.abc import Mapping, Sequence

import msgspec

from nightshift.config.allowlist import value_text
from nightshift.config.train_toml import line_numbers
from nightshift.errors import EngineError, Failure
from nightshift.text import clean


class Refusal(msgspec.Struct):
    """One error of prime-rl."""

    loc: tuple[str | int, ...]  # the path of a key, with variants of unions and positions in lists
    message: str
    input: bool | int | float | str | None = None


class Verdict(msgspec.Struct):
    """The file that the validator writes."""

    errors: tuple[Refusal, ...]


def explain(refusals: Sequence[Refusal], source: str) -> EngineError:
    """Return one error: a refusal of what train.toml contains, otherwise the first refusal, and the number of others.

    It is a failure of the config if train.toml contains the refused key or table. Otherwise train.toml, a value of the
    engine, or the installation may be the cause. `source`: the text of train.toml.
    """
    lines = line_numbers(source)
    is_written, cause = max((_describe(refusal, lines) for refusal in refusals), key=lambda pair: pair[0])
    fix = "Undo the last change to train.toml, or run: uv run nightshift doctor"
    if is_written:
        fix = "Change this value; uv run run.py --keys lists the allowed values"
    more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    return EngineError(cause, f"{fix}{more}.", failure=Failure.CONFIG if is_written else Failure.UNKNOWN)


def _describe(refusal: Refusal, lines: Mapping[tuple[str, ...], int]) -> tuple[bool, str]:
    """Return whether train.toml contains the refused key or table, and the refusal in one line."""
    path, is_written = tuple[str, ...](), False
    for segment in map(str, refusal.loc):  # train.toml does not contain variants and positions
        is_written = (*path, segment) in lines
        path = (*path, segment) if is_written else path
    place = f"train.toml:{lines[path]}: " if path else ""
    name = ".".join(path if is_written else map(str, refusal.loc)) or "train.toml"
    value = "" if refusal.input is None else f" = {value_text(refusal.input)}"
    message = clean(refusal.message.removeprefix("Value error, "), 300)
    return is_written, f"{place}{name}{value}: prime-rl refuses it: {message}"
