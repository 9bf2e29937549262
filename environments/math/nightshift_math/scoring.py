"""Score a completion: 1.0 if its answer equals the right answer, as math-verify reads LaTeX, else 0.0.

The answer is the content of the last `\\boxed{}`, else the last line. If the right answer is a plain number, the given
answer must be that number, exact and fully computed: 0.333 is not 1/3, and 2+3 or 4/8 would reward copying the
question. A unit may be left out, but not replaced. A pair or an interval needs its brackets, as in MATH's own grader.
Sympy decides every other case. Hostile LaTeX (`9^{9^{9}}`) would keep sympy busy forever: there is a limit of CPU time,
and because a signal cannot interrupt all code of sympy, the harness scores in a separate process.
"""

import functools
import re
import signal
from fractions import Fraction
from typing import Any

MAX_CHARS = 400  # the longest answer of MATH-500 has 53
CPU_SECONDS = 1.0  # for one answer; the answers of MATH-500, each compared with another one, took at most 0.4
# LaTeX without an effect on the meaning, and blanks that are not between letters and digits.
_SPACE = re.compile(
    r"\\(?:left|right)(?![a-zA-Z])|\\[!,; ]|~|(?<=\\frac)\s+|(?<![0-9a-zA-Z])\s+|\s+(?![0-9a-zA-Z])|^[$+]|[.$]+$"
)
_FRAC = re.compile(r"(?<=\\)[dt](?=frac)")
# Text before a number, such as `so x =`, and a unit after the number. A unit contains no words for other numbers.
_WORDS = r"(?![^{}]*\b(?:or|and|not|dozen|hundred|thousand|million|billion|trillion)\b)[a-zA-Z. ]*"
_UNIT = re.compile(
    rf"^[^=0-9]*=|(?<=[0-9}}])\\(?:text|mathrm|mbox)\{{{_WORDS}\}}(?:\^\{{?[0-9]\}}?)?$|\^\{{?\\circ\}}?$|\\[$%]"
    rf"| (?=[a-zA-Z]{{2}}){_WORDS}$|(?<=[0-9}}])(?:cm|mm|km|kg|ft|feet|inches)(?:\^\{{?[23]\}}?)?$"
)
# The units that are compared, each with its names. Words of a count, such as students, are ignored.
_WORDED = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\{?[23])?|(?<=[0-9}]) ?[a-zA-Z][a-zA-Z. ]*(?:\^\{?[23])?$")
_MEASURES = """cm centimeter|mm millimeter|km kilometer|m meter|ft foot feet|in inch inche|mi mile|yd yard|kg kilogram|
    g gram|s sec second|min minute|h hr hour|day|week|year|am|pm|cent|dollar|^2 ^{2 square sq|^3 ^{3 cubic"""
_MEASURE = {name: names.split()[0] for names in _MEASURES.split("|") for name in names.split()}
_BRACKETS = re.compile(r"([(\[]).*,.*([)\]])")
_DECIMAL, _SUBSCRIPT = re.compile(r"\.[0-9]"), re.compile(r"_\{?(\w+)")
_BEFORE = re.compile(r"\$|\\[\[\]()]|\bis\b|:|####")  # precedes the answer in the last line
_NUMBER = re.compile(
    r"(-?)(?:([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:/([0-9]+))?|([0-9]*\.[0-9]+)"
    r"|([0-9]*)\\frac(\{-?[0-9]+\}|[0-9])(\{[0-9]+\}|[0-9]))"
)


def extract_answer(text: str) -> str | None:
    """Return the content of the last `\\boxed{}`, or the last line of a text without a box; None for an open box, an
    empty answer, or more than MAX_CHARS characters."""
    _, box, rest = text.rpartition("\\boxed")
    last = text.rstrip(" \t\r\n.*$").rpartition("\n")[2]
    answer = _braced(rest[: MAX_CHARS + 9]) if box else _BEFORE.split(last)[-1].strip()
    return answer if answer and len(answer) <= MAX_CHARS else None


def is_formatted(completion: str) -> bool:
    """Return whether the answer is in a `\\boxed{}`, as requested."""
    return "\\boxed" in completion and extract_answer(completion) is not None


def score(completion: str, answer: str) -> float:
    """Return 1.0 if the final answer of `completion` equals `answer`, else 0.0. TimeoutError after CPU_SECONDS; only in
    the main thread, which is the only thread that a signal interrupts."""
    given = extract_answer(completion)
    if given is None:
        return 0.0
    plain, right = (_SPACE.sub("", _FRAC.sub("", text.replace("{,}", ","))) for text in (given, answer))
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
        return 0.0  # for math-verify a rounded number equals the exact number
    if _SUBSCRIPT.findall(plain) != _SUBSCRIPT.findall(right):
        return 0.0  # math-verify ignores subscripts: 210_5 would equal 210_6
    _load()
    signal.signal(signal.SIGPROF, _stop)
    try:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            return _same(given, answer)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _Late:
        raise TimeoutError(f"the comparison took more than {CPU_SECONDS:g} s of CPU time") from None


@functools.cache
def _load() -> None:
    """Load grammars and sympy, so that loading does not count as the time of the first answer."""
    _same("(x+1)^2", "x^2+2x+1")


class _Late(BaseException):
    """The time limit. A BaseException, because sympy and math-verify catch every Exception."""


def _stop(*_: Any) -> None:
    raise _Late


def _same(given: str, answer: str) -> float:
    """Return 1.0 if sympy reads equal answers. math-verify catches errors: an answer with an error equals nothing."""
    from math_verify import parse, verify

    expressions = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (answer, given))
    return float(verify(*expressions, timeout_seconds=None))


def _braced(text: str) -> str | None:
    """Return the content of the braces at the start of `text`; without braces, as in `\\boxed 2`, up to a `$`."""
    if not text.lstrip().startswith("{"):
        return text.partition("$")[0].strip()
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] == "}":
            return text[text.index("{") + 1 : match.start()].strip()
    return None


def _units(answer: str) -> set[str]:
    """Return the units in an answer. Other words are ignored."""
    words = re.findall(r"[a-z]+|\^\{?[23]", " ".join(_WORDED.findall(answer)).lower().replace(".", ""))
    return {_MEASURE[name] for word in words for name in (word, word.rstrip("s")) if name in _MEASURE}


def _value(answer: str) -> Fraction | None:
    """Return the number of an answer; None for anything but an integer, a decimal, or a fraction in lowest terms."""
    match = _NUMBER.fullmatch(answer)
    if match is None:
        return None
    sign, whole, slash, decimal, mixed, over, under = (group.strip("{}") for group in match.groups(""))
    top, bottom = int((whole or over or "0").replace(",", "")), int(slash or under or 1)
    if bottom == 0 or (mixed and ("-" in over or top >= bottom)):
        return None
    value = Fraction(decimal) if decimal else Fraction(top, bottom)
    if value.denominator != bottom and not decimal:
        return None
    return (-1 if sign else 1) * (value + int(mixed or 0))
