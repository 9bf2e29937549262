"""What Nightshift expects of prime-rl, looked up in a checkout of another commit. docs/pin.md has the procedure.

    uv run tools/pin.py --checkout DIR [--renew]

Each row of pin_expectations.toml is a config key or a text of prime-rl's code that Nightshift relies on. Sources are
parsed, never run. Exit code 1: a row is missing, or could not be looked up.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import click

from nightshift.config.allowlist import ALIASES, ANY, LOCKS, find_key, is_inner, lock
from nightshift.engines.prime_rl.install import Pins
from nightshift.errors import UsageError
from nightshift.files import read_file, write_atomically

TABLE = Path(__file__).with_name("pin_expectations.toml")
ROOT = Path(__file__).resolve().parents[1]
BROKEN = ("missing", "unseen")  # states of a row with which Nightshift cannot go on
_FIX = "Name a checkout of prime-rl: --checkout DIR."
_PLACES = {
    "C/": "packages/prime-rl-configs/src/prime_rl/configs/",
    "P/": "src/prime_rl/",
    "V/": "deps/verifiers/verifiers/v1/",
}
_SOURCES = ("packages/prime-rl-configs/src", "src", "deps/verifiers")
# A docstring or a comment, which prove nothing; or a string, which may hold either as text.
_TOKEN = re.compile(
    r"(?m)(?P<no>^[ \t]*[rRbBfF]*(?P<q>\"\"\"|''')[\s\S]*?(?P=q)|\#[^\n]*)"
    r"|\"\"\"[\s\S]*?\"\"\"|'''[\s\S]*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One expectation: who relies on it, what it is (a key, or text of the code), and at which line it was."""

    user: str
    what: str
    at: str
    is_key: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a row; `now` is its line in the checkout, written as in the table."""

    row: Row
    state: Literal["there", "moved", "missing", "unseen"]
    detail: str = ""
    now: str = ""


@dataclass
class Schema:
    """The keys of RLConfig in a checkout, by dotted path (`*` is a name that users choose), with the lines that declare
    them; and the `open_tables` that take keys which prime-rl does not name."""

    root: Path
    lines: dict[str, list[str]] = field(default_factory=dict)
    open_tables: dict[str, str] = field(default_factory=dict)
    _modules: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        main = self._resolve("prime_rl.configs.rl", ast.Name("RLConfig"))
        if main is None or not isinstance(main[1], ast.ClassDef):
            raise UsageError(f"{self.root} has no class RLConfig in prime_rl.configs.rl", _FIX)
        try:
            self._walk(*main, "", ())
        except (RecursionError, SyntaxError):
            raise UsageError(f"{self.root}: a type in its config classes makes no sense", _FIX) from None

    def _walk(self, module: str, node: ast.ClassDef, prefix: str, around: tuple[str, ...]) -> None:
        """Take in the keys of a class and of all classes below it; a class inside itself is not entered again."""
        if node.name in around:
            return
        for name, (home, line) in self._keys(module, node).items():
            path, at = f"{prefix}.{name}" if prefix else name, f"{self._read(home)[0]}:{line.lineno}"
            self.lines.setdefault(path, []).append(at)
            annotation: ast.AST = line.annotation
            if "SerializeAsAny" in ast.unparse(annotation) and isinstance(line.value, ast.Call):
                annotation = line.value.func  # the default's class has more keys than the declared one
            for kind, value in self._parts(home, annotation):
                if kind == "foreign":
                    self.open_tables.setdefault(path, at)
                elif kind in ("table", "entry"):
                    below = path if kind == "table" else f"{path}.*"
                    if kind == "entry":
                        self.lines.setdefault(below, []).append(f"{self._read(value[0])[0]}:{value[1].lineno}")
                    for statement in value[1].body:
                        if isinstance(statement, ast.Assign) and "extra='allow'" in ast.unparse(statement):
                            self.open_tables.setdefault(below, f"{self._read(value[0])[0]}:{statement.lineno}")
                    self._walk(*value, below, (*around, node.name))

    def _keys(self, module: str, node: ast.ClassDef) -> dict[str, tuple[str, ast.AnnAssign]]:
        """The keys of a class by name, with those that it inherits."""
        keys: dict[str, tuple[str, ast.AnnAssign]] = {}
        for base in reversed(node.bases):
            resolved = self._resolve(module, base)
            if resolved is not None and isinstance(resolved[1], ast.ClassDef):
                keys |= self._keys(*resolved)
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line.annotation):
                keys[ast.unparse(line.target)] = (module, line)
        return keys

    def _parts(self, module: str, node: ast.AST) -> Iterator[tuple[str, Any]]:
        """The classes in an annotation: `table`, `entry` (of a dict), or `foreign` (of another package)."""
        match node:
            case ast.Constant(value=str(text)):
                yield from self._parts(module, ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, right=right):
                yield from self._parts(module, left)
                yield from self._parts(module, right)
            case ast.Subscript(value=outer, slice=inner):
                name = ast.unparse(outer).rpartition(".")[2]
                inside = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                if name in ("list", "dict"):
                    below = self._parts(module, inside[-1])
                    yield from ((kind if name == "list" else "entry", v) for kind, v in below if kind == "table")
                elif name != "Literal":  # Annotated, SerializeAsAny, Optional, Union
                    for one in inside[:1] if name == "Annotated" else inside:
                        yield from self._parts(module, one)
            case ast.Name() | ast.Attribute():
                resolved = self._resolve(module, node)
                if resolved is None:
                    value = self._read(module)[1].get(ast.unparse(node))
                    package = (value.module or "").partition(".")[0] if isinstance(value, ast.ImportFrom) else ""
                    if ast.unparse(node).endswith("Config") and package not in ("", "prime_rl", "verifiers"):
                        yield "foreign", None
                elif isinstance(resolved[1], ast.ClassDef):
                    yield "table", resolved
                else:
                    yield from self._parts(*resolved)

    def _resolve(self, module: str, node: ast.AST) -> tuple[str, Any] | None:
        """The class or alias that a name stands for, with its module; None for what the checkout does not define."""
        names = self._read(module)[1]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            package = names.get(node.value.id)
            return self._resolve(package.name, ast.Name(node.attr)) if isinstance(package, ast.alias) else None
        value = names.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(value, ast.ImportFrom):
            original = next(a.name for a in value.names if (a.asname or a.name) == ast.unparse(node))
            return self._resolve(value.module or "", ast.Name(original))
        return None if value is None or isinstance(value, ast.alias) else (module, value)

    def _read(self, module: str) -> tuple[str, dict[str, Any]]:
        """The module's file below the checkout, and what its names stand for; both empty where there is none."""
        if module not in self._modules:
            name = module.replace(".", "/")
            tried = (f"{root}/{name}{end}" for root in _SOURCES for end in (".py", "/__init__.py"))
            path = next((path for path in tried if (self.root / path).is_file()), "")
            self._modules[module] = path, _defined(self.root / path) if path else {}
        return self._modules[module]


def _defined(path: Path) -> dict[str, Any]:
    """What a module's names stand for: a class, an alias's value, or the import that brings it."""
    try:
        tree = ast.parse(read_file(path))
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError) as error:
        raise UsageError(f"{path} cannot be read: {error}", _FIX) from None
    names: dict[str, Any] = {}
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                names[name] = node
            case ast.ImportFrom(names=imported) | ast.Import(names=imported):
                is_from = isinstance(node, ast.ImportFrom)
                names |= {alias.asname or alias.name: node if is_from else alias for alias in imported}
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
                names[ast.unparse(target)] = value
    return names


def rows() -> list[Row]:
    """All expectations, as the table lists them: config keys first."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    keys = [Row(user, key, at, True) for user, lines in table["keys"].items() for key, at in lines.items()]
    return keys + [Row(user, text, at, False) for user, lines in table["text"].items() for at, text in lines.items()]


def look_up(root: Path, pins: Pins) -> tuple[list[Finding], list[str]]:
    """Every row in the checkout at `root`, in order; and its keys that are neither open nor locked.

    UsageError if it is no prime-rl, or if this Python cannot parse its sources.
    """
    _code.cache_clear()
    schema = Schema(root)
    findings = [_look_up(row, schema, pins) for row in rows()]
    names = {path.replace(f".{ANY}", ".x") for path in schema.lines}
    known = {n for n in names if find_key(n) or is_inner(n) or lock(tuple(n.split("."))) or n in ALIASES}
    named = tuple(f"{path}." for entry in LOCKS for path in entry.former)  # a lock says what to write instead
    return findings, sorted(name for name in names - known if not f"{name}.".startswith(named))


def _look_up(row: Row, schema: Schema, pins: Pins) -> Finding:
    root = schema.root
    if row.at.startswith("V/") and not (root / _PLACES["V/"]).is_dir():
        return Finding(row, "unseen", f"{_PLACES['V/']} is empty: git submodule update --init")
    if not row.is_key:
        path = expanded(row.at).rpartition(":")[0]
        text = re.sub("<([a-z_]+)>", lambda name: getattr(pins, name[1], name[0]), row.what)
        if numbers := lines_of(root / path, text):
            return _found(row, [f"{path}:{number}" for number in numbers])
        return Finding(row, "missing", "" if (root / path).is_file() else f"no {path}")
    table, _, leaf = row.what.rpartition(".")
    if row.what in schema.lines:
        return _found(row, schema.lines[row.what])
    if table in schema.open_tables and row.user.endswith("passed through"):
        return _found(row, [schema.open_tables[table]])
    near = [path for path in schema.lines if path.rpartition(".")[2] == leaf]
    return Finding(row, "missing", f"perhaps {near[0]}" if near else "")


def _found(row: Row, places: list[str]) -> Finding:
    now = places[0]
    for short, folder in _PLACES.items():
        now = now.replace(folder, short, 1)
    return Finding(row, "there") if expanded(row.at) in places else Finding(row, "moved", f"to {now}", now)


def lines_of(path: Path, text: str) -> list[int]:
    """The lines of a file where a text begins, by whole words and however it is wrapped."""
    code, words = _code(path), r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", text)))
    start, end = r"\b" * text[0].isalnum(), r"\b" * text[-1].isalnum()
    return [code.count("\n", 0, match.start()) + 1 for match in re.finditer(start + words + end, code)]


@cache
def _code(path: Path) -> str:
    """A file without comments and docstrings, line for line; empty where there is none."""
    try:
        source = read_file(path).decode("utf-8", "replace")
    except OSError:
        return ""
    if path.suffix != ".py":
        return source
    return _TOKEN.sub(lambda token: "\n" * token[0].count("\n") if token["no"] else token[0], source)


def expanded(at: str) -> str:
    """A place of the table as a path of the checkout."""
    return _PLACES.get(at[:2], at[:2]) + at[2:]


def report(findings: Iterable[Finding], new: Iterable[str]) -> list[str]:
    """A line for each row that breaks and for each new key of prime-rl; then the numbers."""
    findings = list(findings)
    lines = []
    for finding in [finding for finding in findings if finding.state in BROKEN]:
        row, what = finding.row, " ".join(finding.row.what.split())
        lines.append(f"{finding.state:<9}{row.user}: {what}  [{row.at}]  {finding.detail}".rstrip())
    lines += [f"new      {path}: neither open nor locked, so train.toml may not name it" for path in new]
    states = Counter(finding.state for finding in findings)
    return [*lines, f"{len(findings)} expectations: {', '.join(f'{n} {state}' for state, n in sorted(states.items()))}"]


def renew(findings: Iterable[Finding]) -> None:
    """Write the lines at which moved rows stand now into the table, whose rows are in the order of `findings`."""
    rest = iter(findings)
    lines = TABLE.read_text(encoding="utf-8").splitlines(keepends=True)
    pairs = ((line, next(rest) if line.startswith('"') else None) for line in lines)
    text = "".join(line.replace(f'"{f.row.at}"', f'"{f.now}"') if f and f.now else line for line, f in pairs)
    write_atomically(TABLE, text.encode())


@click.command(help=__doc__)
@click.option("--checkout", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--renew", "is_renewed", is_flag=True, help="Write the lines of rows that moved into the table.")
def main(checkout: Path, is_renewed: bool) -> None:
    """Look up, print, write."""
    try:
        findings, new = look_up(checkout, Pins.read(ROOT / "pyproject.toml"))
    except UsageError as error:
        raise click.ClickException(str(error)) from None
    click.echo("\n".join(report(findings, new)))
    if is_renewed:
        renew(findings)
    sys.exit(any(finding.state in BROKEN for finding in findings))


if __name__ == "__main__":
    main()
