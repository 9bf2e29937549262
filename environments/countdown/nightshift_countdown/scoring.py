"""Whether a completion reaches the target: 1.0 or 0.0.

Its answer is what follows the last `####`, to the end of that line, or is in a later `\\boxed{}`; else its last line.
It may go on with `= 54`, if that is the target, and its signs may be those of print. It is read strictly: numbers,
+ - * / and brackets, each given number at most once, no other number, computed exactly. Nothing of it is ever
executed. Any text is answered in linear time and without an exception.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from fractions import Fraction

MAX_CHARS = 100  # longer is no answer; also bounds how deep it nests

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_PRINTED = str.maketrans({"\u00d7": "*", "\u22c5": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "$": " "})
_ALLOWED = re.compile(r"[0-9+\-*/() ]++(?:=[ ]*+[0-9]++)?")


def extract_answer(text: str) -> str | None:
    """The final answer as `text` writes it, `(13-4)*6 = 54`; None if it is none."""
    _, hashes, after = text.rpartition("####")
    _, box, boxed = (after if hashes else text).rpartition("\\boxed{")
    lines = (boxed.partition("}")[0] if box else after if hashes else text.rstrip().rpartition("\n")[2]).split("\n", 1)
    answer = lines[0].translate(_PRINTED).strip(" \t\r.`*")
    return answer if len(answer) <= MAX_CHARS and _ALLOWED.fullmatch(answer) else None


def is_formatted(completion: str) -> bool:
    """Whether it ends with a line that is nothing but the expression: the one that `score` reads."""
    return extract_answer(completion) == completion.rstrip().rpartition("\n")[2].strip()


def score(completion: str, answer: str) -> float:
    """1.0 if `completion` reaches the target of `answer` by its numbers: `(13-4)*6=54` has the target and them all."""
    given, _, result = (extract_answer(completion) or "").partition("=")
    gold, _, target = answer.partition("=")
    if Counter(_numbers(given)) - Counter(_numbers(gold)) or result.strip() not in ("", target):
        return 0.0
    return 1.0 if _value(given) == int(target) else 0.0


def _numbers(expression: str) -> list[str]:
    return re.findall("[0-9]+", expression)


def _value(expression: str) -> Fraction | None:
    """What it says, exactly; None where it says nothing: `2**3`, `-2`, `1/0`, `3 4`."""
    try:
        return _computed(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return None


def _computed(node: ast.expr) -> Fraction | None:
    """Of a whole tree; None where a part of it is no number and none of the four operations."""
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _computed(left), _computed(right)
            return None if a is None or b is None else _OPERATORS[type(op)](a, b)
    return None
