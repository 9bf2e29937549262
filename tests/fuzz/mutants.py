"""train.toml files by class: from such as a careful agent writes to random bytes.

Those of the first classes know the grammar: they are made of the keys, bounds and locks of train_toml.
"""

import json
import re
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from nightshift.config.allowlist import ANY, KEYS
from nightshift.config.values import Key, Kind
from tests.checkouts import ROOT
from tests.fuzz.oracle import LOCKED, LOCKED_ANYWHERE

SHIPPED = (ROOT / "train.toml").read_text()
Assignment = tuple[tuple[str, ...], str]  # a path, and its value as TOML spells it
_NAMES = st.from_regex(r"\A[A-Za-z][A-Za-z0-9_-]{0,8}\Z")
_HOSTILE_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
_ANY_VALUE = st.sampled_from([
    "true", "false", "0", "-1", "1", "2", "3", "7", "64", "1_000", "0x10", "1e-6", "0.5", "1.0", "2.5", "nan", "inf",
    "-inf", "1e400", "9223372036854775808", "''", "'None'", "'adamw'", "[]", "[1]", "['q_proj']", "{}", "{a=1}",
    "[[1]]", "[{}]", "2026-01-01", "12:30:00", "2026-01-01T00:00:00Z",
]) | _HOSTILE_TEXT.map(json.dumps)  # fmt: skip


def _number(key: Key) -> st.SearchStrategy[str]:
    low = key.minimum if key.minimum is not None else key.above if key.above is not None else -1000
    high = key.maximum if key.maximum is not None else key.below if key.below is not None else 10_000
    if key.kind is Kind.INT:
        return st.integers(int(low), int(high)).map(str) | st.sampled_from((int(low), int(high))).map(str)
    floats = st.floats(low, high, exclude_min=key.above is not None, exclude_max=key.below is not None)
    return floats.map(repr)


def _allowed(key: Key) -> st.SearchStrategy[str]:
    """Values that the key takes by itself."""
    if key.kind is Kind.TABLE:
        values = st.just("{}")
    elif key.kind is Kind.BOOL:
        values = st.sampled_from(("true", "false"))
    elif key.kind is Kind.CHOICE:
        values = st.sampled_from(key.choices).map(json.dumps)
    elif key.kind is Kind.LIST:
        values = st.lists(st.sampled_from(key.choices), min_size=1, unique=True).map(json.dumps)
    else:
        values = _number(key)
    return values | st.just('"None"') if key.nullable else values


@st.composite
def _assignment(draw: st.DrawFn, values: Callable[[Key], st.SearchStrategy[str]]) -> Assignment:
    key = draw(st.sampled_from(KEYS))
    path = tuple(draw(_NAMES) if part == ANY else part for part in key.path.split("."))
    return path, draw(values(key))


# What most files hold: a batch that its groups divide, and room for a completion.
_BASE: list[Assignment] = [(("orchestrator", "batch_size"), "256"), (("orchestrator", "group_size"), "4")]


@st.composite
def _careful(draw: st.DrawFn) -> list[Assignment]:
    """Open keys with values that they take; whether they go together is another question."""
    more = draw(st.lists(_assignment(_allowed), max_size=5))
    named = dict([*_BASE, *more])
    # A table that is written with its keys is switched on by them.
    return [(path, value) for path, value in named.items() if not any(p[: len(path)] == path != p for p in named)]


def _spelt(name: str, style: int) -> str:
    if style == 1:
        return f"'{name}'"
    if style == 2:
        return '"' + "".join(f"\\u{ord(char):04x}" for char in name) + '"'
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _dotted(assignments: Sequence[Assignment], style: int) -> str:
    return "".join(f"{'.'.join(_spelt(part, style) for part in path)} = {value}\n" for path, value in assignments)


def _with_headers(assignments: Sequence[Assignment], style: int) -> str:
    tables: dict[tuple[str, ...], str] = {(): ""}
    for path, value in assignments:
        tables[path[:-1]] = tables.get(path[:-1], "") + f"{_spelt(path[-1], style)} = {value}\n"
    heads = {path: f"[{'.'.join(_spelt(part, style) for part in path)}]\n" if path else "" for path in tables}
    return "".join(heads[path] + text for path, text in tables.items())


def _inline(assignments: Sequence[Assignment], style: int) -> str:
    lines = []
    for path, value in assignments:
        for part in reversed(path[1:]):
            value = f"{{{_spelt(part, style)} = {value}}}"
        lines.append(f"{_spelt(path[0], style)} = {value}\n")
    return "".join(lines)


def _arrays(assignments: Sequence[Assignment], style: int) -> str:
    return "".join(
        f"[[{'.'.join(_spelt(part, style) for part in path[:-1]) or 'top'}]]\n{_spelt(path[-1], style)} = {value}\n"
        for path, value in assignments
    )


_renderer = st.sampled_from((_dotted, _with_headers))
_any_renderer = st.sampled_from((_dotted, _with_headers, _inline, _arrays))
_style = st.integers(0, 2)


@st.composite
def careful(draw: st.DrawFn) -> bytes:
    """What a careful agent writes."""
    return draw(_renderer)(draw(_careful()), draw(_style)).encode()


@st.composite
def wrong_values(draw: st.DrawFn) -> bytes:
    """An open key with a value of any type, in or out of range."""
    assignment = draw(_assignment(lambda key: _ANY_VALUE))
    return draw(_renderer)([*_BASE, assignment], draw(_style)).encode()


@st.composite
def locked_keys(draw: st.DrawFn) -> bytes:
    """A careful file and a locked key, in any spelling; or a name that is locked wherever it stands."""
    if draw(st.booleans()):
        path = tuple(draw(st.sampled_from(sorted(LOCKED))).split("."))
    else:
        path = tuple(draw(st.sampled_from(KEYS)).path.replace(ANY, "a").split("."))
        path = (*path[: draw(st.integers(0, len(path)))], draw(st.sampled_from(sorted(LOCKED_ANYWHERE))))
    below = (draw(_NAMES),) if draw(st.booleans()) else ()
    render = draw(_any_renderer)
    locked = render([((*path, *below), draw(_ANY_VALUE))], draw(_style))
    before = draw(st.booleans())
    own = _dotted(draw(_careful()), 0)
    return (locked + own if before and render is _dotted else own + locked).encode()


@st.composite
def misspelt_keys(draw: st.DrawFn) -> bytes:
    """An open key with a letter dropped, doubled, swapped, in capitals or of another alphabet."""
    path, value = draw(_assignment(_allowed))
    index = draw(st.integers(0, len(path) - 1))
    name = path[index]
    at = draw(st.integers(0, len(name) - 1))
    twins = {"a": "\u0430", "e": "\u0435", "o": "\u043e", "i": "\u0456", "l": "1", "_": "-"}
    edits = (
        name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:], name.upper(), f"{name} ", f"\u200b{name}",
        name[:at] + twins.get(name[at], "\uff4d") + name[at + 1 :], f"{name}.{name}",
    )  # fmt: skip
    wrong = (*path[:index], draw(st.sampled_from(edits)), *path[index + 1 :])
    return draw(_renderer)([*_BASE, (wrong, value)], draw(_style)).encode()


@st.composite
def odd_structures(draw: st.DrawFn) -> bytes:
    """Open keys in several structures at once, which may clash: dotted, inline, arrays of tables, deep nesting."""
    assignments = draw(_careful())
    pieces = [assignments[::2], assignments[1::2]] if draw(st.booleans()) else [assignments, assignments[-1:]]
    text = "".join(draw(_any_renderer)(piece, draw(_style)) for piece in pieces)
    depth = draw(st.sampled_from((0, 0, 0, 0, 5, 20, 300, 2000)))
    deep = f"{'.'.join(['a'] * depth)} = 1\n" if draw(st.booleans()) else f"a = {'[' * depth}{']' * depth}\n"
    return (text + deep if depth else text).encode()


@st.composite
def moved_lines(draw: st.DrawFn) -> bytes:
    """The shipped file with lines taken out, doubled, moved, or their comment signs taken away."""
    lines = SHIPPED.splitlines()
    for _ in range(draw(st.integers(1, 4))):
        at, to = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines) - 1))
        match draw(st.integers(0, 3)):
            case 0 if len(lines) > 1:
                del lines[at]
            case 1:
                lines.insert(to, lines[at])
            case 2:
                lines[at], lines[to] = lines[to], lines[at]
            case _:
                lines[at] = lines[at].replace("# ", "", 1)
    return "\n".join(lines).encode()


@st.composite
def changed_bytes(draw: st.DrawFn) -> bytes:
    """The shipped file with bytes flipped, put in, taken out, or cut off."""
    data = bytearray(SHIPPED.encode())
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.integers(0, 3)):
            case 0 if data:
                data[at] = draw(st.integers(0, 255))
            case 1:
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case 2:
                del data[at : at + draw(st.integers(1, 40))]
            case _:
                del data[at:]
    return bytes(data)


@st.composite
def encodings_and_sizes(draw: st.DrawFn) -> bytes:
    """Whole files in other encodings and line ends, with marks, zero bytes, long lines, many lines, or empty."""
    text = draw(_renderer)(draw(_careful()), 0)
    encoded = st.sampled_from(("utf-8-sig", "utf-16", "utf-32", "utf-7", "cp037", "utf-8")).map(text.encode)
    ends = st.sampled_from(("\r\n", "\r", "\n\r", "\u2028", "\0\n", "\x85", "\x0c\n")).map(
        lambda end: text.replace("\n", end).encode()
    )
    size = draw(st.sampled_from((1, 100, 990, 1_100, 60_000, 70_000, 1_000_000)))
    sized = st.sampled_from(("# {}\n", "x = '{}'\n", "{} = 1\n")).map(
        lambda form: (text + form.format("a" * size)).encode()
    )
    many = st.sampled_from(("\n", "#\n", "[a]\n", "\t \n")).map(lambda line: (text + line * size).encode())
    return draw(encoded | ends | sized | many | st.sampled_from((b"", b"\n", b"\xff\xfe", b"\xc0\x80", b"=", b"[")))


def noise() -> st.SearchStrategy[bytes]:
    """Random text and random bytes."""
    symbols = st.text(st.sampled_from("[]{}=.,'\"\\#\n \tabc019-_"), max_size=80)
    return symbols.map(str.encode) | st.binary(max_size=200) | _HOSTILE_TEXT.map(str.encode)


CLASSES: dict[str, Callable[[], st.SearchStrategy[bytes]]] = {
    make.__name__.replace("_", " "): make
    for make in (
        careful, wrong_values, locked_keys, misspelt_keys, odd_structures, moved_lines, changed_bytes,
        encodings_and_sizes, noise,
    )
}  # fmt: skip
