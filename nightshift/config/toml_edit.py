"""Change values in train.toml, and keep its comments, blank lines and spelling."""

import tomllib
from collections.abc import Mapping
from typing import Any

from nightshift.config.allowlist import default
from nightshift.config.toml_text import MAX_LINE, header_path, statements
from nightshift.config.train_toml import parse
from nightshift.config.values import value_text

ABSENT = object()  # as a value: remove the key from the file


def set_values(source: bytes, changes: Mapping[str, Any]) -> bytes:
    """Return a valid train.toml with other values; comments, order and everything else stay as they are.

    `git revert` can undo one of two changes if an unchanged line is between them. So an empty line separates an added
    key from the key above it, and the empty lines around a key that is removed between two keys stay.

    A change to ABSENT removes the key with the comment on its line. None writes "None", or removes the key if None is
    its default (KeyError: the key is not open). {} switches a table on. ConfigError: source or result is refused.
    """
    import tomlkit  # slow to import, and only proposers write

    resolved = parse(source).resolved
    document = tomlkit.parse(source.decode())
    added: dict[str, Any] = {}
    for path, value in changes.items():
        is_gone = value is ABSENT or (value is None and default(path, resolved) is None)
        before = tomlkit.dumps(document) if is_gone else ""
        if not _set(document, path, ABSENT if is_gone else value):
            added[path] = value
        elif is_gone:
            document = tomlkit.parse(_without_gap(before, tomlkit.dumps(document)))
    text = tomlkit.dumps(document)
    for path, value in added.items():
        text = _add(text, path, value)
    return parse(text.encode()).source


def _set(document: Any, path: str, value: Any) -> bool:
    """Change or remove a key in place. Returns False if the key has to be added: it is absent, or has another form."""
    import tomlkit

    *tables, leaf = path.split(".")
    node = document
    for table in tables:
        if not hasattr(node.get(table), "items"):
            if value is not ABSENT:
                node.pop(table, None)  # switched off with "None": it comes back as a table
            return value is ABSENT
        node = node[table]
    is_table = hasattr(node.get(leaf), "items")
    if is_table and value == {}:
        return True
    if is_table or leaf not in node or value is ABSENT or value == {}:
        node.pop(leaf, None)
        return value is ABSENT
    after = tomlkit.value(value_text(value, MAX_LINE))
    trivia = node.item(leaf).trivia if hasattr(node, "item") else None  # None: a table whose parts stand apart
    if trivia and trivia.comment:  # the comment stays in its column
        num_spaces = len(trivia.comment_ws) + len(node.item(leaf).as_string()) - len(after.as_string())
        trivia.comment_ws = " " * max(num_spaces, 1)
    node[leaf] = after
    return True


def _without_gap(before: str, after: str) -> str:
    """Return `after`, the text `before` less one statement, also less the empty line above it if no key is below."""
    end = next((place for place, old in enumerate(before) if after[place : place + 1] != old), len(after))
    is_last = after[end : end + 1] in "\n" and after[end:].lstrip()[:1] in "[#"
    has_gap = before != after and after[:end].endswith("\n\n")
    return after[: end - 1] + after[end:] if is_last and has_gap else after


def _add(text: str, path: str, value: Any) -> str:
    """Return `text` with a key that it does not hold."""
    import tomlkit

    table, _, leaf = path.rpartition(".")
    line = f"{leaf} = {value_text(value, MAX_LINE)}"
    added = _insert(text, path, "") if value == {} else _insert(text, table, line)
    try:
        tomllib.loads(added)
        return added
    except tomllib.TOMLDecodeError:  # the table is inline or in dotted keys: it cannot have a header
        document = tomlkit.parse(text)
        node: Any = document
        for segment in path.split(".")[:-1]:
            node = node.setdefault(segment, {})
        node[leaf] = {} if value == {} else tomlkit.value(value_text(value, MAX_LINE))
        return tomlkit.dumps(document)


def _insert(text: str, table: str, line: str) -> str:
    """Return `text` with `line` as the last statement of `[table]` ("" is the top of the file).

    A table without a header gets one at the end. Comments above the next header stay there.
    """
    if text and not text.endswith("\n"):
        text += "\n"
    ends: dict[str, tuple[int, str]] = {}  # of each table: the end of its last statement, the gap below that statement
    name = ""
    for start, end in statements(text):
        is_header = text[start:end].lstrip()[0] == "["
        if is_header:
            name = ".".join(header_path(tomllib.loads(text[start:end])))
        ends[name] = end, "" if is_header else "\n"
    if table and table not in ends:
        return f"{text}\n[{table}]\n{line}\n".rstrip("\n") + "\n"
    place, gap = ends.get(table, (0, ""))
    return f"{text[:place]}{gap}{line}\n{text[place:]}" if line else text
