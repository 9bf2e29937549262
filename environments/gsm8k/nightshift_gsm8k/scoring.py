"""Whether a completion ends in the right number: 1.0 or 0.0.

The answer of a completion is its last `#### x` or `\\boxed{x}`, whichever comes later, else its last number. A line
`#### x` says an answer where it says nothing else, or where it ends the text and names one number (`#### 18 dollars`).
Any other is a heading: `#### 1. Calculate` answers nothing by its number.

That is what `score` reads, whatever the form. The form that is asked for is narrower: `is_formatted`.

Numbers are compared exactly and as numbers: `$1,234.00` equals `1234`, `50%` equals `50`, `3/4` equals
`0.75`. A division left undone is no number: `48/2` does not equal `24`, or a policy would be paid for
leaving out the last step. Any text is answered in linear time and without an exception.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_NUMBER_CHARS = 100  # longer is no answer; also stays below Python's limit on digits of an int
MAX_BOX_CHARS = 1000  # a longer box holds no final answer

# Possessive quantifiers (`++`, `*+`): what was matched is never given back, so nothing is quadratic.
_MINUS = "-\u2212"
_SIGN = rf"[{_MINUS}+]"
_DIGITS = r"(?:(?<![.0-9])\.)?[0-9]++(?:[.,/][0-9]++)*+"
_NUMBER = re.compile(rf"(?:(?<![\w)\]]){_SIGN})?(?:\${_SIGN}?)?{_DIGITS}")
_LAST_DIGIT = re.compile(r".*[0-9]", re.DOTALL)
# What follows the number of a heading: `1)`, `1:`, `1. Add`, `1 - Add`.
_ENUMERATOR = r"[*_\\]*+(?:[):]|\.(?=[ \t*_]*+[^\s*_])|[ \t]++[-\u2013\u2014][ \t]++(?=[*_]*+[^\W0-9_]))"
_ALONE = r"(?:[ \t\r*_`.!%$\u20ac\u00a3\"'\\]|\\[)\]])*+(?:\n|\Z)"
# Words after the number, and digits only in brackets or as the exponent of a unit: `m^2`, `cm3`.
_WITH_UNIT = rf"(?!{_ENUMERATOR})(?:\([^()\n#]*+\)|[^0-9\n#]|(?<=[A-Za-z^{{])[0-9]++)*+\s*+\Z"
_AFTER_HASHES = re.compile(
    rf".*####(?!#)[ \t*]*+((?:{_SIGN}[ \t]*+)?(?:\\?\$[ \t]*+)?{_SIGN}?{_DIGITS})(?={_ALONE}|{_WITH_UNIT})", re.DOTALL
)
_HEADING = re.compile(rf"(?<!#)##++[ \t*_]*+(?:(?:[Ss]tep|[Pp]art)[ \t]++[0-9]++|[0-9]++(?:\.[0-9]++)*+{_ENUMERATOR})")
_ASKED = re.compile(r"(?:.*\n)?[ \t]*+####[ \t]++-?[0-9]++(?:,[0-9]{3})*+(?:\.[0-9]++)?\s*+", re.DOTALL)

_VALUE = re.compile(
    rf"(?P<sign>{_SIGN}?)(?P<whole>[0-9]{{1,3}}(?:,[0-9]{{2,3}})*,[0-9]{{3}}|[0-9]*)"
    r"(?:\.(?P<decimals>[0-9]+)|/(?P<denominator>[0-9]+))?%?"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*+\{([0-9]++)\}\s*+\{([0-9]++)\}")
_NO_VALUE = str.maketrans("", "", " \t\\$")


def _boxed(depth: int) -> re.Pattern[str]:
    """A pattern of the last `\\boxed{...}` whose content nests braces at most `depth` deep."""
    content = "[^{}]*+"
    for _ in range(depth):
        content = rf"(?:[^{{}}]++|\{{{content}\}})*+"
    return re.compile(rf".*\\boxed\s*+\{{({content})\}}", re.DOTALL)


_BOXED = _boxed(depth=3)


def extract_answer(text: str) -> str | None:
    """The final answer as `text` writes it, e.g. `$1,234.00`; None if `text` holds no number."""
    hashes, box = _AFTER_HASHES.match(text), _BOXED.match(text)
    if box and len(box[1]) <= MAX_BOX_CHARS and (hashes is None or hashes.end() < box.start(1)):
        plain = _LATEX_FRACTION.sub(r"\1/\2", box[1]).replace("{,}", ",").replace("\\,", "").replace("\\!", "")
        # The first number: what follows it in a box is a unit, as in `12 \text{ m}^2`.
        if number := _NUMBER.search(plain):
            return number[0]
    if hashes:
        return hashes[1]
    text = _HEADING.sub("\n", text) if "##" in text else text  # a newline: what stood around it is no one number
    if match := _LAST_DIGIT.match(text):
        # A number that fills the window is too long to be one, so cutting it does no harm.
        window = text[max(0, match.end() - MAX_NUMBER_CHARS - 4) : match.end()]
        last: str = _NUMBER.findall(window)[-1]
        return last
    return None


def is_formatted(completion: str) -> bool:
    """Whether it ends with the very line that is asked for: `#### n`, a bare number, and nothing after it.

    Then `n` is what `score` reads: a strict score is the score of the formatted ones and 0 for all others.
    """
    return _ASKED.fullmatch(completion) is not None


def score(completion: str, answer: str) -> float:
    """1.0 if the final answer of `completion` equals the number `answer`, else 0.0."""
    gold = _value(answer)
    given = extract_answer(completion)
    return 1.0 if given is not None and gold is not None and _value(given) == gold else 0.0


def _value(number: str) -> Fraction | None:
    """The number that `number` writes, or None: `1,2,3`, `5/0`, `48/2` and a date are none."""
    if len(number) > MAX_NUMBER_CHARS:
        return None
    match = _VALUE.fullmatch(number.strip().translate(_NO_VALUE))
    if match is None:
        return None
    sign, whole, decimals, denominator = match.groups()
    if not whole and not decimals:
        return None
    numerator = int((whole.replace(",", "") or "0") + (decimals or ""))
    if denominator is None:
        value = Fraction(numerator, 10 ** len(decimals or ""))
    elif int(denominator) < 2:
        return None
    else:
        value = Fraction(numerator, int(denominator))
        if value.denominator != int(denominator):  # not in lowest terms: a division left undone
            return None
    return -value if sign and sign in _MINUS else value
