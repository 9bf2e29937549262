"""Score a completion: 1.0 if it ends in the right number, else 0.0.

The answer follows the last `####`, `\\boxed{` or `<answer>`, or the last `answer is` if there is no `####`. Without a
marker the answer is the last number of the last sentence that has a number. Headings (`#### 1. Add`), labels (`step 3`)
and text that imitates the next turn (`Question:`, `User:`, `<|im_end|>`) are not read. An answer does not count if the
text after it names another number (`No, 19`) or retracts it.
"""

import re
import unicodedata
from collections import deque
from fractions import Fraction

from nightshift_gsm8k.numbers import DIGIT, MAX_CHARS, read

# Patterns that search the whole text have possessive quantifiers (`++`, `*+`): no search takes quadratic time.
_ASKED = re.compile(r"(?:.*\n)?[ \t]*+####[ \t]++-?[0-9]++(?:,[0-9]{3})*+(?:\.[0-9]++)?\s*+", re.DOTALL)
_PRINTED = (*range(0xBC, 0xBF), *range(0x2150, 0x215F), *range(0xFF01, 0xFF5F))  # fractions and full-width characters
_AS_ASCII = {code: " " * (code < 0xFF01) + unicodedata.normalize("NFKC", chr(code)) for code in _PRINTED}
_NEXT_TURN = re.compile(  # `User:`, `**Problem 2:**`, `<|im_end|>`, or `user` alone on its line
    r"(?i)<\|[^|<>\n]{1,40}\|>|</s>|\n[^\w\n]{0,9}(?:(?:next|new|another) )?"
    r"(?:human|user|assistant|system|question|problem|exercise|example|instruction|q)[ 0-9*_]*+[:\n]"
)
_HEADING = re.compile(  # also the number of a list item; `## 1 Calculate` is a heading if a number follows below
    r"(?m)(?<!#)##++[ \t*_]*+[0-9]++(?:\.[0-9]++)*+(?:[*_\\]*+(?:\)|:(?![0-9])|\.(?=[ \t*_]*+[^\W0-9_])"
    r"|[ \t]++[-\u2013\u2014][ \t]++(?=[*_]*+[^\W0-9_]))|[ ](?=[A-Z][a-z][^\n]{0,200}+\n[^0-9]{0,900}+[0-9]))"
    r"|^[ \t]*+(?:[-*\u2022]|[0-9]++[.)])[ \t]++(?=\S)"
)
_LABEL = re.compile(r"(?i)\b(?:step|part|question|problem|example|equation|line|confidence)s?[^\w*+/=-]{0,3}[0-9.]++")
_MARKER = re.compile(
    r"(?P<line>####(?!#))|(?P<box>\\boxed\s*+\{)|(?P<tag>(?i:<(?:final_)?answer>))"
    r"|(?P<phrase>(?im:(?:\b(?:the|final|correct)\s|^[^\w\n]{0,9})answer\b[\"'*_\s]{0,4}(?::|=|\bis\b|\bequals\b))[\s*_:]*+)"
)
_SENTENCE = re.compile(r"(?:[^\n.!?<]|<(?!\|)|[.!?](?!\s+[^\s0-9]))*+[.!?]?")
_CONTENT = {"tag": re.compile("[^<]*+"), "box": re.compile(r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+")}
_DIRECTLY = re.compile(r"(?i:\\[a-z]++|[^\w\n]|(?:the|final|answer|total|is|it|so|about|usd|rs|[a-z])(?![a-z]))*+[0-9]")
_ELEMENT = re.compile(r"<(\w++)>[^<]*+</\1>")  # `<confidence>90</confidence>`
# In the text after an answer: words after which another answer counts, and sentences that name another answer or none.
_DOUBT = re.compile(
    r"(?i)\b(?:actually|(?:wait|sorry)(?=[^\w.!?]+\w)|correct(?:ion|ed)|wrong|incorrect|should (?:be|have)"
    r"|second thoughts?|let me (?:re|check|verify|try|correct|fix)\w*|answer(?: is|:))\b"
)
_OFFER = re.compile(
    r"(?i)[\W_]*+(?:(?:(?!(?:as|which|for|in|per|after|before|from|by|of|at|with|if|on|out|than|not)\b)[a-z]++[\W_]++){0,4}+"
    r"[0-9][0-9.,]*+[\W_]*+$|(?:(?:no|nope|or|oops|maybe|perhaps|possibly|alternatively|wait|sorry|hmm|rather|it|s|is|be"
    r"|could|might|answer|total)[\W_]++|(?:the|so|final)[\W_]++(?=[a-z]))++[0-9])"
)
_WRONG = re.compile(
    r"(?i)(?!.*\b(?:if|(?:no|any)thing)\b)(?:.*(?:(?<!not )(?<!n't )\b(?:wrong|incorrect|mistaken)\b"
    r"|(?:\bnot|n't) (?:right|correct)\b|\b(?:made a|my) (?:mistake|error)|\b(?:scratch|disregard|ignore) th)"
    r"|(?:\W*+(?:oh|wait|hmm)\b)*+\W*+(?:no|nope|oops)\W*+$)"
)


def extract_answer(text: str) -> str | None:
    """Return the final answer as `text` writes it, e.g. `$1,234.00`; None if `text` has no answer."""
    return (_answer(text) or (None, None))[1]


def is_formatted(completion: str) -> bool:
    """Return whether the completion ends with the requested line, `#### n` with a bare number, which `score` reads."""
    return _ASKED.fullmatch(completion) is not None and not any(map(_marked, _turns(completion)[:-1]))


def score(completion: str, answer: str) -> float:
    """Return 1.0 if the final answer of `completion` equals the number `answer`, else 0.0."""
    gold, given = read(answer), _answer(completion)
    return 1.0 if gold and given and gold[0] == given[0] else 0.0


def _turns(text: str) -> list[str]:
    """Return the text up to each next turn, without the numbers of headings and labels."""
    text = re.sub(r" and (?:a|one)[ -]half\b", " 1/2", text.translate(_AS_ASCII).replace("\u2044", "/"))
    # A newline replaces a heading, so that the text before and after a heading is not read as a single number.
    return [_LABEL.sub(" ", _HEADING.sub("\n", turn)) for turn in _NEXT_TURN.split(text)]


def _marked(turn: str) -> list[tuple[str, str, bool, str]]:
    """Return each marked answer: marker, statement, whether the number follows directly, and the text behind."""
    answers = []
    for marker in deque(_MARKER.finditer(turn), 30):
        kind = marker.lastgroup or ""
        statement = next(_CONTENT.get(kind, _SENTENCE).finditer(turn, marker.end(), marker.end() + MAX_CHARS + 1))[0]
        rest = turn[marker.end() + len(statement) :]
        is_direct = kind in _CONTENT or bool(_DIRECTLY.match(statement))
        if DIGIT.search(statement) and (is_direct or (kind == "line" and not DIGIT.search(rest))):
            answers.append((kind, statement, is_direct, rest))
    return answers


def _answer(text: str) -> tuple[Fraction, str] | None:
    turns = _turns(text)
    answers = next(filter(None, map(_marked, turns)), [])
    has_line = any(kind == "line" for kind, *_ in answers)
    for kind, statement, is_direct, rest in reversed(answers):
        if kind != "phrase" or not has_line:
            answer = read(statement.rstrip("!") if kind == "phrase" else statement, is_prose=not is_direct)
            return answer if answer and not _is_taken_back(_ELEMENT.sub("", rest), answer[0]) else None
    return _prose(next(filter(DIGIT.search, turns), ""))


def _is_taken_back(rest: str, answer: Fraction) -> bool:
    """Return whether the text after an answer ends with another answer or calls the answer wrong."""
    sentences, doubt, is_wrong = _SENTENCE.findall(rest), _DOUBT.search(rest), False
    for sentence in sentences:
        is_wrong = bool(_WRONG.match(sentence)) or (is_wrong and not DIGIT.search(sentence))
    named = [*filter(_OFFER.match, sentences), rest[doubt.start() :] if doubt else ""]
    last = _prose(rest)
    is_other = any(other[0] != answer for other in filter(None, map(_prose, named)))
    return is_wrong or (is_other and not (last and last[0] == answer))


def _prose(text: str) -> tuple[Fraction, str] | None:
    """Read the last sentence with a number. A sentence in brackets counts only if there is no other."""
    sentences = [sentence.strip(" \t!") for sentence in _SENTENCE.findall(text) if DIGIT.search(sentence)]
    sentences.sort(key=lambda sentence: sentence[0] not in "([")
    return read(sentences[-1], is_prose=True) if sentences else None
