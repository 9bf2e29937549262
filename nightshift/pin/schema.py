"""prime-rl's config keys as its sources state them: type, choices, bounds, default and line of each.

The sources are read, never imported: no package of prime-rl has to be installed, and nothing of the checkout runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from nightshift.errors import UsageError
from nightshift.files import read_file

_ROOTS = ("packages/prime-rl-configs/src", "src", "deps/verifiers")
_MAIN = ("prime_rl.configs.rl", "RLConfig")
_BOUNDS = ("ge", "gt", "le", "lt")
_FIX = "Name a checkout of prime-rl: --checkout DIR."
UNKNOWN = object()  # a default that is no literal: made by a factory, or another table

Table: TypeAlias = tuple[str, ast.ClassDef]  # with the module that it stands in


@dataclass(frozen=True)
class Field:
    """A key in one combination of variants, by the key that selects each: `trainer.optim.type`: `adamw`.

    `types`: names of types; `table` has keys of its own, `None` is null. `choices`: literal values. `anything`: where
    it allows keys that are not named here: they are of another package, or passed through to one.
    """

    at: str
    variants: Mapping[str, str]
    types: frozenset[str]
    choices: frozenset[Any] = frozenset()
    default: Any = UNKNOWN
    bounds: Mapping[str, float] = field(default_factory=dict)
    anything: str | None = None


@dataclass
class Schema:
    """All keys of prime-rl's RLConfig in the checkout at `root`, by dotted path; `*` for names that people choose."""

    root: Path
    fields: dict[str, list[Field]] = field(default_factory=dict)
    _modules: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        main = self._resolve(_MAIN[0], ast.Name(_MAIN[1]))
        if main is None or not isinstance(main[1], ast.ClassDef):
            raise UsageError(f"{self.root} has no class {_MAIN[1]} in {_MAIN[0]}", _FIX)
        try:
            self._walk(main, "", {}, ())
        except (RecursionError, SyntaxError):
            raise UsageError(f"{self.root}: a type in its config classes makes no sense", _FIX) from None

    def _walk(self, table: Table, prefix: str, variants: Mapping[str, str], around: tuple[str, ...]) -> None:
        """Take in the keys of a class and of all classes below it; a class inside itself is not entered again."""
        if table[1].name in around:
            return
        for name, (module, node) in self._keys(table).items():
            path = f"{prefix}.{name}" if prefix else name
            at, (default, bounds) = f"{self._file(module)}:{node.lineno}", _default(node.value)
            parts = list(self._parts(module, node.annotation))
            if "SerializeAsAny" in ast.unparse(node.annotation) and isinstance(node.value, ast.Call):
                parts = [*self._parts(module, node.value.func)]  # the default's class has more keys than the declared
            tables: list[Table] = [value for kind, value in parts if kind == "table"]
            self.fields.setdefault(path, []).append(
                Field(
                    at=at,
                    variants=variants,
                    types=frozenset(str(value) if kind == "type" else kind for kind, value in parts),
                    choices=frozenset(value for kind, value in parts if kind == "literal"),
                    default=default,
                    bounds=bounds,
                    anything=at if any(kind == "foreign" for kind, _ in parts) else self._anything(tables),
                )
            )
            inside = (*around, table[1].name)
            for one in tables:
                chosen = self._selected(path, one) if len(tables) > 1 else {}
                self._walk(one, path, {**variants, **chosen}, inside)
            for entry in (value for kind, value in parts if kind == "entry"):
                at = f"{self._file(entry[0])}:{entry[1].lineno}"
                self.fields.setdefault(f"{path}.*", []).append(Field(at, variants, frozenset({"table"})))
                self._walk(entry, f"{path}.*", variants, inside)

    def _keys(self, table: Table) -> dict[str, tuple[str, ast.AnnAssign]]:
        """The keys of a class by name, with those that it inherits."""
        module, node = table
        found: dict[str, tuple[str, ast.AnnAssign]] = {}
        for base in reversed(node.bases):
            resolved = self._resolve(module, base)
            if resolved is not None and isinstance(resolved[1], ast.ClassDef):
                found |= self._keys(resolved)
        for line in node.body:
            match line:
                case ast.AnnAssign(target=ast.Name(id=name)) if "ClassVar" not in ast.unparse(line.annotation):
                    found[name] = (module, line)
        return found

    def _selected(self, path: str, table: Table) -> dict[str, str]:
        """Which key below `path` selects a class in a union, and its value: the one that has but one."""
        for name, (module, node) in self._keys(table).items():
            parts = list(self._parts(module, node.annotation))
            if [kind for kind, _ in parts] == ["literal"]:
                return {f"{path}.{name}": str(parts[0][1])}
        return {f"{path}.type": table[1].name}

    def _anything(self, tables: list[Table]) -> str | None:
        lines = ((module, line) for module, node in tables for line in node.body if isinstance(line, ast.Assign))
        allowing = ((module, line.lineno) for module, line in lines if "extra='allow'" in ast.unparse(line))
        return next((f"{self._file(module)}:{number}" for module, number in allowing), None)

    def _parts(self, module: str, node: ast.AST) -> Iterator[tuple[str, Any]]:
        """What an annotation allows: type, foreign, None, literal, table, list, dict or entry (of a dict), and what."""
        match node:
            case ast.Constant(value=None):
                yield "None", None
            case ast.Constant(value=str(text)):
                yield from self._parts(module, ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, right=right):
                yield from self._parts(module, left)
                yield from self._parts(module, right)
            case ast.Subscript(value=outer, slice=inner):
                name = ast.unparse(outer).rpartition(".")[2]
                inside = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                if name == "Literal":
                    yield from (("literal", value.value) for value in inside if isinstance(value, ast.Constant))
                elif name in ("list", "dict"):
                    yield name, None
                    below = self._parts(module, inside[-1])
                    yield from ((kind if name == "list" else "entry", v) for kind, v in below if kind == "table")
                else:  # Annotated, SerializeAsAny, Optional, Union
                    yield from (("None", None) for _ in inside if name == "Optional")
                    for one in inside[:1] if name == "Annotated" else inside:
                        yield from self._parts(module, one)
            case ast.Name() | ast.Attribute():
                resolved = self._resolve(module, node)
                if resolved is None:
                    yield "foreign" if self._is_foreign(module, node) else "type", ast.unparse(node)
                elif isinstance(resolved[1], ast.ClassDef):
                    yield "table", resolved
                else:
                    yield from self._parts(*resolved)

    def _resolve(self, module: str, node: ast.AST) -> tuple[str, Any] | None:
        """The class or alias that a name stands for, with its module; None for what the checkout does not define."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            package = self._names(module).get(node.value.id)
            return self._resolve(package.name, ast.Name(node.attr)) if isinstance(package, ast.alias) else None
        found = self._names(module).get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(found, ast.ImportFrom):
            original = next(a.name for a in found.names if (a.asname or a.name) == ast.unparse(node))
            return self._resolve(found.module or "", ast.Name(original))
        return None if found is None or isinstance(found, ast.alias) else (module, found)

    def _is_foreign(self, module: str, node: ast.AST) -> bool:
        """True for a config class of a package that is none of prime-rl's, nor verifiers."""
        found = self._names(module).get(node.id) if isinstance(node, ast.Name) and node.id.endswith("Config") else None
        package = (found.module or "").partition(".")[0] if isinstance(found, ast.ImportFrom) else ""
        return package not in ("", "prime_rl", "verifiers")

    def _names(self, module: str) -> dict[str, Any]:
        return self._read(module)[1]

    def _file(self, module: str) -> str:
        return self._read(module)[0]

    def _read(self, module: str) -> tuple[str, dict[str, Any]]:
        """The module's file below the checkout, and what its names stand for; both empty where there is none."""
        if module not in self._modules:
            name = module.replace(".", "/")
            tried = (f"{root}/{name}{end}" for root in _ROOTS for end in (".py", "/__init__.py"))
            path = next((path for path in tried if (self.root / path).is_file()), "")
            self._modules[module] = path, _defined(self.root / path) if path else {}
        return self._modules[module]


def _defined(path: Path) -> dict[str, Any]:
    """What a module's names stand for: a class, an alias's value, or the import that brings it."""
    try:
        tree = ast.parse(read_file(path))
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError) as error:
        raise UsageError(f"{path} cannot be read: {error}", _FIX) from None
    found: dict[str, Any] = {}
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                found[name] = node
            case ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name: node for alias in names}
            case ast.Import(names=names):
                found |= {alias.asname or alias.name: alias for alias in names}
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found[name] = value
    return found


def _default(node: ast.expr | None) -> tuple[Any, dict[str, float]]:
    """A key's default and the bounds that stand in its Field(...)."""
    bounds: dict[str, float] = {}
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Field":
        given = {word.arg: word.value for word in node.keywords}
        limits = {name: getattr(given.get(name), "value", None) for name in _BOUNDS}
        bounds = {name: limit for name, limit in limits.items() if isinstance(limit, int | float)}
        node = next(iter(node.args), given.get("default"))
    try:
        return (UNKNOWN if node is None else ast.literal_eval(node)), bounds
    except ValueError:
        return UNKNOWN, bounds
