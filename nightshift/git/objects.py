"""git's objects as bytes: what a tree holds, and the name that git gives to such bytes."""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

FOLDER, SUBMODULE = "40000", "160000"  # modes of what is no file in a tree


class Blob(NamedTuple):
    """An entry of a tree: `mode` 120000 is a link, `id` hashes its bytes."""

    mode: str
    id: str


def object_id(kind: bytes, data: bytes, width: int) -> str:
    """The name that git gives to such bytes: hex of `width` digits, 40 for sha1 and 64 for sha256."""
    digest = hashlib.sha1 if width == 40 else hashlib.sha256
    return digest(b"%s %d\0" % (kind, len(data)) + data).hexdigest()


def entries_of(tree: bytes, width: int) -> dict[str, Blob]:
    """What a tree object holds, by name: `mode name NUL id` each; an id has `width` hex digits, half as many bytes."""
    found = {}
    while tree:
        entry, _, rest = tree.partition(b"\0")
        mode, _, name = entry.partition(b" ")
        found[os.fsdecode(name)] = Blob(mode.decode(), rest[: width // 2].hex())
        tree = rest[width // 2 :]
    return found
