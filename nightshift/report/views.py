"""What commands say, as data: one JSON object on stdout for `--json`, and what their text is made from.

Each is a Struct here with its `kind` and `version`; tools/schemas.py makes the JSON Schemas in docs/schemas of these
types. Names are those that people see; scores and differences of scores are fractions, seconds are wall-clock, and null
is "not measured".
"""

from __future__ import annotations

import json
from typing import Literal

import msgspec


class Part(msgspec.Struct):
    """What stands in an answer; a schema lets names stand beside these, for some may be added."""


class View(Part, kw_only=True, tag_field="kind"):
    """One answer. `version` is another one when a name goes or means something else; names may be added."""

    version: Literal[1] = 1


def encoded(view: View) -> str:
    """One line of ASCII, whatever texts it holds. What is no finite number is null."""
    plain = json.dumps(msgspec.to_builtins(view, enc_hook=msgspec.json.decode))  # of scores, which stay as they are
    return json.dumps(json.loads(plain, parse_constant=lambda name: None))
