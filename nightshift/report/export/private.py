"""What does not leave this machine with a campaign: its paths, and secrets that somebody wrote where they are recorded.

Paths of two names or more are replaced wherever they stand, known ones and all that begins with them even where they
have blanks; of secrets the values of variables that are called so, what looks like a token of a known service, and
whoever an address names before an @.
"""

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PLACE, SECRET = "<path>", "<secret>"
_WORD = r"""(?:\\[ ]|[^\s/"'`\\:;,()\[\]{}<>|*=])"""  # a letter of a name in a path
_MORE = rf"(?:[ ]{_WORD}+(?:[ ]{_WORD}+){{0,2}}/(?:{_WORD}+/)*{_WORD}*)*"  # "... smith/a plan/x": a name with blanks
_TAIL = rf"(?:/{_WORD}*)*{_MORE}"
_ADDRESS = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]{0,20}://(?:[^\s\"'`<>\\:]|:(?!/))*")
_NAMED = re.compile(r"(?<=://)[^/?#\s]*@")  # user:password@
# Not within a relative path, a fraction or a unit; an option may stand before it, and what JSON or TOML write for a
# control character.
_ANY_PATH = re.compile(
    rf"""(?<=["'])/[^/"'\n]+/[^"'\n]*(?=["'])"""
    rf"|(?:(?<=\\[nrtbf])|(?<=\s-[A-Za-z])|(?<=^-[A-Za-z])|(?<![\w.~/\-]))/+(?:{_WORD}+/)+{_WORD}*{_MORE}"
)
_IS_SECRET = re.compile(r"(?i)key|token|secret|passw|passphrase|credential|(?:_|^)(?:pat|pwd)$(?<!^pwd)")
_TOKEN = re.compile(
    r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bxox[abprs]-[\w-]{10,}|\bglpat-[\w-]{16,}|\bAIza[\w-]{30,}"
    r"|\beyJ[\w-]{8,2000}\.[\w-]{8,}\.[\w-]*"  # a JSON web token
)
_LEAST = 8  # characters of a variable's value: a shorter one is found everywhere


class Private:
    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        places = {str(place) for each in (root, Path.home(), Path(sys.prefix), Path(tempfile.gettempdir()))
                  for place in (each, each.resolve())}  # fmt: skip
        known = [place for place in places if place.count("/") > 1 or len(place) >= _LEAST]
        secrets = {value for name, value in environ.items() if _IS_SECRET.search(name) and len(value) >= _LEAST}
        self._places = _any_of(known, rf"{_WORD}*{_TAIL}")
        self._secrets = _any_of(value for value in secrets if not value.isdigit())
        self._numbers = _any_of((value for value in secrets if value.isdigit()), r"(?!\w)", r"(?<!\w)")

    def text(self, text: str) -> str:
        for secret in (self._secrets, self._numbers, _TOKEN):
            text = secret.sub(SECRET, text)
        parts, end = [], 0
        for address in _ADDRESS.finditer(text):
            is_file = address[0].lower().startswith("file:")
            parts += [self._without_paths(text[end : address.start()]), PLACE if is_file else _named(address[0])]
            end = address.end()
        return "".join((*parts, self._without_paths(text[end:])))

    def _without_paths(self, text: str) -> str:
        return _ANY_PATH.sub(PLACE, self._places.sub(PLACE, text))


def _any_of(texts: Any, after: str = "", before: str = "") -> re.Pattern[str]:
    """What finds each of them, the longest first, as it is or as JSON writes it; where there is none, nothing."""
    spelled = {each for text in texts for each in (text, json.dumps(text)[1:-1])}
    words = "|".join(map(re.escape, sorted(spelled, key=len, reverse=True)))
    return re.compile(f"{before}(?:{words}){after}" if words else r"(?!)")


def _named(address: str) -> str:
    return _NAMED.sub(f"{SECRET}@", address)
