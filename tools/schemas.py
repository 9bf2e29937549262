"""The JSON Schemas of record.json and of `nightshift status --json`, made from their types: docs/schemas/KIND.json.

uv run tools/schemas.py docs/schemas       writes them
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from nightshift.campaign.records import Record
from nightshift.cli.status import Status
from nightshift.files import Document

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
DOCUMENTS: tuple[type[Document], ...] = (Record, Status)


def schemas() -> dict[str, dict[str, Any]]:
    """By kind; JSON Schema 2020-12."""
    found = {}
    for document in DOCUMENTS:
        kind = str(document.__struct_config__.tag)
        found[kind] = {"$schema": _DIALECT, "title": f"nightshift {kind}"} | msgspec.json.schema(document)
    return found


def text_of(schema: dict[str, Any]) -> str:
    """As its file holds it."""
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    for kind, schema in schemas().items():
        Path(sys.argv[1], f"{kind}.json").write_text(text_of(schema))
