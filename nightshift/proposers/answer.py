"""What an agent answers beside its train.toml: a few lines of a file, by their labels."""

from __future__ import annotations

import re

from nightshift.proposers.brief import MAX_SENTENCE
from nightshift.text import clean

_LABELS = {
    "HYPOTHESIS": "hypothesis",
    "MECHANISM": "mechanism",
    "PREDICTION": "prediction",
    "REFUTED BY": "refuted_by",
    "OUTCOME": "told_outcome",
    "LESSON": "lesson",
}
_ANSWER = re.compile(rf"\b({'|'.join(_LABELS)})\b[ \t*]*+:[ \t*]*")


def parse_answer(text: str) -> dict[str, str]:
    """By the names of Proposal, the last of each that a text says as `HYPOTHESIS: ... PREDICTION: ...`, on one line or
    several; cleaned, and without the placeholders of the form."""
    found = {}
    for line in text.splitlines():
        pieces = _ANSWER.split(line)
        for name, value in zip(pieces[1::2], pieces[2::2], strict=True):
            cleaned = clean(value.strip(" \t*`|"), MAX_SENTENCE)
            if cleaned and not cleaned.startswith("<"):
                found[_LABELS[name]] = cleaned
    return found
