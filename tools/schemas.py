"""The JSON Schemas of all views, made from their types: docs/schemas/KIND.json.

uv run tools/schemas.py docs/schemas       writes them
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from nightshift.cli.views.compared import Certified, Chain, Diff, Doctor, Planned, Verified
from nightshift.cli.views.history import History, Show
from nightshift.cli.views.status import Status
from nightshift.report.views import View

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
VIEWS: tuple[type[View], ...] = (*(Status, History, Show, Diff, Chain, Certified, Planned, Verified, Doctor),)


def schemas() -> dict[str, dict[str, Any]]:
    """By kind; JSON Schema 2020-12."""
    found = {}
    for view in VIEWS:
        schema = msgspec.json.schema(view)
        kind = str(view.__struct_config__.tag)
        found[kind] = {"$schema": _DIALECT, "title": f"nightshift {kind}"} | schema
    return found


def text_of(schema: dict[str, Any]) -> str:
    """As its file holds it."""
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    for kind, schema in schemas().items():
        Path(sys.argv[1], f"{kind}.json").write_text(text_of(schema))
