"""What prime-rl's own classes refuse of a run's config (validate.py), as one error in the lines of train.toml."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from nightshift.config.allowlist import value_text
from nightshift.config.train_toml import line_numbers
from nightshift.errors import EngineError, Failure
from nightshift.files import read_file
from nightshift.text import clean

# By whose fault a refusal is, in the order of reports.
_FIXES = {
    Failure.CONFIG: "Change that; uv run run.py --keys lists what is allowed",
    Failure.UNKNOWN: "Undo the last change to train.toml, or run: uv run nightshift doctor",
    Failure.INFRASTRUCTURE: "This is not train.toml's fault. Run: uv run nightshift doctor",
}


class Refusal(msgspec.Struct):
    """One error of prime-rl: `loc` is the path of a key, with variants of unions and positions in lists."""

    loc: tuple[str | int, ...]
    message: str
    type: str
    input: bool | int | float | str | None = None


class _Verdict(msgspec.Struct):
    errors: tuple[Refusal, ...] = ()


def read_refusals(verdict: Path) -> tuple[Refusal, ...]:
    """Read what the validator refuses; OSError or msgspec.DecodeError if it wrote no verdict."""
    return msgspec.json.decode(read_file(verdict), type=_Verdict).errors


def explain(refusals: Sequence[Refusal], source: str) -> EngineError:
    """Return all refusals as one error, led by what the agent can change; `source` is the text of train.toml."""
    described = [(*_describe(refusal, source), len(refusal.loc)) for refusal in refusals]
    failure, cause, _ = min(described, key=lambda row: ([*_FIXES].index(row[0]), row[2]))
    more = f" (and {len(described) - 1} more)" if len(described) > 1 else ""
    return EngineError(cause, f"{_FIXES[failure]}{more}.", failure=failure)


def _describe(refusal: Refusal, source: str) -> tuple[Failure, str]:
    """Return whose fault a refusal is, and the refusal in one line.

    train.toml is to blame if it contains the refused key or table. prime-rl may refuse another key because of
    train.toml, of a value that the engine fills in, or of the installation.
    """
    message = clean(refusal.message.removeprefix("Value error, "), 300)
    if refusal.type[:1].isupper() and not refusal.loc:  # an exception; the types of pydantic's errors are in lower case
        return Failure.INFRASTRUCTURE, f"prime-rl's validation failed: {refusal.type}: {message}"
    path, line, is_written = tuple[str, ...](), None, False
    for segment in refusal.loc:  # train.toml has no segment for a variant or a position
        found = line_numbers(source).get((*path, str(segment)))
        is_written = found is not None
        if is_written:
            path, line = (*path, str(segment)), found
    name = ".".join(path if is_written else map(str, refusal.loc))
    value = "" if refusal.input is None else f" = {value_text(refusal.input)}"
    where = "" if line is None else f"train.toml:{line}"
    place = ": ".join(filter(None, [where, name + value])) or "train.toml"
    return Failure.CONFIG if is_written else Failure.UNKNOWN, f"{place}: prime-rl refuses it: {message}"
