"""Score a completion: 1.0 if its expression reaches the target, else 0.0.

The answer is the rest of the line after the last `####`, the content of a later `\\boxed{}`, or else the last line. The
answer may end with `= 54` if 54 is the target, and may use typographic operators. Allowed are numbers, + - * / and
brackets, each given number at most once and no other number. No text is executed.
"""

import ast
import operator
import re
from collections import Counter
from fractions import Fraction

MAX_CHARS = 100  # a longer text is not an answer; also bounds the depth of brackets

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_PRINTED = str.maketrans({"\u00d7": "*", "\u22c5": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "$": " "})
_ALLOWED = re.compile(r"[0-9+\-*/() ]++(?:=[ ]*+[0-9]++)?")


def extract_answer(text: str) -> str | None:
    """Return the final answer as `text` writes it, `(13-4)*6 = 54`; None if `text` has no answer."""
    _, hashes, after = text.rpartition("####")
    _, box, boxed = (after if hashes else text).rpartition("\\boxed{")
    lines = (boxed.partition("}")[0] if box else after if hashes else text.rstrip().rpartition("\n")[2]).split("\n", 1)
    answer = lines[0].translate(_PRINTED).strip(" \t\r.`*")
    return answer if len(answer) <= MAX_CHARS and _ALLOWED.fullmatch(answer) else None


def is_formatted(completion: str) -> bool:
    """Return whether the completion ends with a line that is only the expression that `score` reads."""
    return extract_answer(completion) == completion.rstrip().rpartition("\n")[2].strip()


def score(completion: str, answer: str) -> float:
    """Return 1.0 if `completion` reaches the target of `answer` with its numbers, else 0.0. `answer`: `(13-4)*6=54`."""
    given, _, result = (extract_answer(completion) or "").partition("=")
    gold, _, target = answer.partition("=")
    used, allowed = (Counter(re.findall("[0-9]+", text)) for text in (given, gold))
    if used - allowed or result.strip() not in ("", target):
        return 0.0
    try:
        return float(_value(ast.parse(given, mode="eval").body) == int(target))
    except (SyntaxError, ZeroDivisionError):
        return 0.0


def _value(node: ast.expr) -> Fraction:
    """Return the exact value of a syntax tree of numbers and + - * /. SyntaxError for other nodes: `2**3`, `-2`."""
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise SyntaxError
