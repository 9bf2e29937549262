"""Whether a completion's answer equals the right one, as math-verify reads LaTeX: 1.0 or 0.0.

The answer is the content of the last `\\boxed{}`, else the last line. Where the right answer is a plain number, the
given one must be that number, exactly and computed to its end: 0.333 is no 1/3, and 2+3 or 4/8 would pay for copying
the question. A unit may be left out, and may be no other. A pair or an interval needs its brackets, as for MATH's own
grader. Everything else sympy decides, which hostile LaTeX (`9^{9^{9}}`) keeps busy for ever, so there is a limit, of
CPU time: other load makes no answer wrong. For the hard cases, code that no signal reaches, the harness scores in a
process of its own and ends that.
"""

from __future__ import annotations

import functools
import re
import signal
from fractions import Fraction
from typing import Any

MAX_CHARS = 400  # the longest answer of MATH-500 has 53
CPU_SECONDS = 1.0  # for one answer; those of MATH-500, each against another one, took 0.4 at most
# What makes no difference in print, and blanks beside anything but letters and digits.
_SPACE = re.compile(
    r"\\(?:left|right)(?![a-zA-Z])|\\[!,; ]|~|(?<=\\frac)\s+|(?<![0-9a-zA-Z])\s+|\s+(?![0-9a-zA-Z])|^[$+]|[.$]+$"
)
# What may stand before a number, such as `so x =`, and its unit after it, in which no other number may be meant.
_WORDS = r"(?![^{}]*\b(?:or|and|not|dozen|hundred|thousand|million|billion|trillion)\b)[a-zA-Z. ]*"
_UNIT = re.compile(
    rf"^[^=0-9]*=|(?<=[0-9}}])\\(?:text|mathrm|mbox)\{{{_WORDS}\}}(?:\^\{{?[0-9]\}}?)?$|\^\{{?\\circ\}}?$|\\[$%]"
    rf"| (?=[a-zA-Z]{{2}}){_WORDS}$|(?<=[0-9}}])(?:cm|mm|km|kg|ft|feet|inches)(?:\^\{{?[23]\}}?)?$"
)
# What tells units apart, each by its names; the words of a count, such as students, do not.
_WORDED = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\{?[23])?|(?<=[0-9}]) ?[a-zA-Z][a-zA-Z. ]*(?:\^\{?[23])?$")
_MEASURES = """cm centimeter|mm millimeter|km kilometer|m meter|ft foot feet|in inch inche|mi mile|yd yard|kg kilogram|
    g gram|s sec second|min minute|h hr hour|day|week|year|am|pm|cent|dollar|^2 ^{2 square sq|^3 ^{3 cubic"""
_MEASURE = {name: one.split()[0] for one in _MEASURES.split("|") for name in one.split()}
_BRACKETS = re.compile(r"([(\[]).*,.*([)\]])")
_DECIMAL, _SUBSCRIPT = re.compile(r"\.[0-9]"), re.compile(r"_\{?(\w+)")
_BEFORE = re.compile(r"\$|\\[\[\]()]|\bis\b|:|####")  # the answer in a last line
_NUMBER = re.compile(
    r"(-?)(?:([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:/([0-9]+))?|([0-9]*\.[0-9]+)"
    r"|([0-9]*)\\frac(?:\{(-?[0-9]+)\}|([0-9]))(?:\{([0-9]+)\}|([0-9])))"
)


def extract_answer(text: str) -> str | None:
    """The content of the last closed `\\boxed{}`; without any box the last line; None for neither, or a box that is
    never closed, or an answer of over MAX_CHARS."""
    _, box, rest = text.rpartition("\\boxed")
    last = text.rstrip(" \t\r\n.*$").rpartition("\n")[2]
    found = _braced(rest[: MAX_CHARS + 9]) if box else _BEFORE.split(last)[-1].strip()
    return found if found and len(found) <= MAX_CHARS else None


def is_formatted(completion: str) -> bool:
    """Whether its answer stands in a `\\boxed{}`, as asked."""
    return "\\boxed" in completion and extract_answer(completion) is not None


def score(completion: str, answer: str) -> float:
    """1.0 if the final answer of `completion` equals `answer`, else 0.0. TimeoutError where that cannot be told within
    CPU_SECONDS; ValueError outside the main thread, which alone can be stopped."""
    given = extract_answer(completion)
    if given is None:
        return 0.0
    plain, right = _printed(given), _printed(answer)
    if plain == right:
        return 1.0
    units, brackets = [_units(text) for text in (plain, right)], _BRACKETS.fullmatch(right)
    if all(units) and units[0] != units[1]:
        return 0.0
    if brackets and not (brackets[1] in plain and plain.endswith(brackets[2])):
        return 0.0
    wanted = _value(right if "=" in right else _UNIT.sub("", right).strip())
    if wanted is not None:
        return float(_value(_UNIT.sub("", _UNIT.sub("", plain)).strip()) == wanted)
    if len({bool(_DECIMAL.search(text)) for text in (plain, right)}) > 1:
        return 0.0  # math-verify takes what is rounded for the same
    if _SUBSCRIPT.findall(plain) != _SUBSCRIPT.findall(right):
        return 0.0  # of which it sees nothing: 210_5 and 210_6
    _load()
    before = signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        try:
            return _same(given, answer)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _Late:
        raise TimeoutError(f"not told within {CPU_SECONDS:g} s of CPU time") from None
    finally:
        signal.signal(signal.SIGPROF, before)


@functools.cache
def _load() -> None:
    """Grammars and sympy, which is not an answer's time."""
    _same("(x+1)^2", "x^2+2x+1")


class _Late(BaseException):
    """An error that neither sympy nor math-verify takes for one of its own."""


def _stop(*_: Any) -> None:
    raise _Late


def _same(given: str, answer: str) -> float:
    from math_verify import parse, verify

    try:
        right, said = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (answer, given))
        return float(verify(right, said, timeout_seconds=None))
    except MemoryError:
        raise
    except Exception:  # whatever sympy raises on it: what cannot be read equals nothing
        return 0.0


def _braced(text: str) -> str | None:
    """What stands in the braces that `text` begins with; up to a `$` where it begins with none, as in `\\boxed 2`."""
    if not text.lstrip().startswith("{"):
        return text.partition("$")[0].strip()
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] == "}":
            return text[text.index("{") + 1 : match.start()].strip()
    return None


def _printed(answer: str) -> str:
    return _SPACE.sub("", answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ","))


def _units(answer: str) -> set[str]:
    """The measures that stand beside what `answer` writes; other words tell nothing."""
    words = re.findall(r"[a-z]+|\^\{?[23]", " ".join(_WORDED.findall(answer)).lower().replace(".", ""))
    return {_MEASURE[name] for word in words for name in (word, word.rstrip("s")) if name in _MEASURE}


def _value(answer: str) -> Fraction | None:
    """The number that `answer` writes: a whole one, decimals, or a fraction in lowest terms."""
    match = _NUMBER.fullmatch(answer)
    if match is None:
        return None
    sign, whole, slash, decimal, mixed, *fraction = match.groups()
    over, under = "".join(filter(None, fraction[:2])), "".join(filter(None, fraction[2:]))
    if mixed and (over.startswith("-") or int(over) >= int(under)):
        return None
    if (bottom := int(slash or under or 1)) == 0:
        return None
    value = Fraction(decimal) if decimal else Fraction(int((whole or over).replace(",", "")), bottom)
    if value.denominator != bottom and not decimal:
        return None
    return (-1 if sign else 1) * (value + int(mixed or 0))
