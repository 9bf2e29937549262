"""The errors of prime-rl's validation of a config (validate.py), as one error that names the line of train.toml."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from nightshift.config.allowlist import value_text
from nightshift.config.train_toml import line_numbers
from nightshift.errors import EngineError, Failure
from nightshift.files import parse_json, read_file
from nightshift.text import clean

# The fix by the kind of failure. The first kind is reported first.
_FIXES = {
    Failure.CONFIG: "Change this value; uv run run.py --keys lists the allowed values",
    Failure.UNKNOWN: "Undo the last change to train.toml, or run: uv run nightshift doctor",
    Failure.INFRASTRUCTURE: "This is not train.toml's fault. Run: uv run nightshift doctor",
}


class Refusal(msgspec.Struct):
    """One error of prime-rl."""

    loc: tuple[str | int, ...]  # the path of a key, with variants of unions and positions in lists
    message: str
    type: str
    input: bool | int | float | str | None = None


class _Verdict(msgspec.Struct):
    errors: tuple[Refusal, ...] = ()


def read_refusals(verdict: Path) -> tuple[Refusal, ...]:
    """Read the errors of the validator. OSError or ValueError if it wrote no verdict."""
    return parse_json(read_file(verdict), _Verdict).errors


def explain(refusals: Sequence[Refusal], source: str) -> EngineError:
    """Return one error: the refusal that the agent can best fix, and the number of others.

    `source`: the text of train.toml.
    """
    described = [_describe(refusal, source) for refusal in refusals]
    failure, cause = min(described, key=lambda row: [*_FIXES].index(row[0]))
    more = f" (and {len(described) - 1} more)" if len(described) > 1 else ""
    return EngineError(cause, f"{_FIXES[failure]}{more}.", failure=failure)


def _describe(refusal: Refusal, source: str) -> tuple[Failure, str]:
    """Return the kind of failure, and the refusal in one line.

    It is a failure of the config if train.toml contains the refused key or table. Otherwise train.toml, a value of the
    engine, or the installation may be the cause.
    """
    message = clean(refusal.message.removeprefix("Value error, "), 300)
    if refusal.type[:1].isupper() and not refusal.loc:  # an exception; the types of pydantic's errors are in lower case
        return Failure.INFRASTRUCTURE, f"prime-rl's validation failed: {refusal.type}: {message}"
    lines, path = line_numbers(source), tuple[str, ...]()
    is_written = False
    for segment in map(str, refusal.loc):  # train.toml does not contain variants and positions
        is_written = (*path, segment) in lines
        path = (*path, segment) if is_written else path
    place = f"train.toml:{lines[path]}: " if path else ""
    name = ".".join(path if is_written else map(str, refusal.loc)) or "train.toml"
    value = "" if refusal.input is None else f" = {value_text(refusal.input)}"
    return Failure.CONFIG if is_written else Failure.UNKNOWN, f"{place}{name}{value}: prime-rl refuses it: {message}"
