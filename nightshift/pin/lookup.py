"""Each row of expectations.toml in a checkout of prime-rl: there, moved, changed, missing, or not to be looked up."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

from nightshift.engines.prime_rl.effective import effective
from nightshift.engines.prime_rl.installation import Pins
from nightshift.engines.prime_rl.launch import Launch, leaves
from nightshift.engines.prime_rl.ports import Ports
from nightshift.files import read_file, write_atomically
from nightshift.pin.schema import UNKNOWN, Field, Schema
from nightshift.rules_toml import Chosen, rules_of
from nightshift.train_toml.config import parse
from nightshift.train_toml.keys import ANY, KEYS, is_inner, variants
from nightshift.train_toml.locks import SHARED, SOURCE, lock
from nightshift.train_toml.values import Key, Kind

TABLE = Path(__file__).with_name("expectations.toml")
_ROOT = Path(__file__).parents[2]  # of this checkout, whose environments a run is planned with
_PLACES = {
    "C/": "packages/prime-rl-configs/src/prime_rl/configs/",
    "P/": "src/prime_rl/",
    "V/": "deps/verifiers/verifiers/v1/",
}
_OWN = f"{SOURCE}.env.taskset."  # of our own package but for its id
# Everything that the engine can force: adapters and pools bring keys of their own.
_FULL = b"""[orchestrator]
group_size = 2
[trainer.model.lora]
[orchestrator.train.source.curriculum.sampler]
type = "difficulty_pool"
[orchestrator.train.source.curriculum.sampler.pools.all]
threshold = 1.0
weight = 1.0
"""
_TYPES = dict(zip(Kind, ("int", "float", "bool", "literal", "list", "table"), strict=True))
# A docstring or a comment, which prove nothing, or a string, in which either is text.
_TOKEN = re.compile(
    r"(?m)(?P<no>^[ \t]*[rRbBfF]*(?P<q>\"\"\"|''')[\s\S]*?(?P=q)|\#[^\n]*)"
    r"|\"\"\"[\s\S]*?\"\"\"|'''[\s\S]*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One expectation: what `user` relies on, `what` it is (a key, or text of the code) and where it was at the pin."""

    user: str
    what: str
    at: str
    is_key: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a row: its state, how so, and where it stands now, written as in the table."""

    row: Row
    state: Literal["there", "moved", "changed", "missing", "unseen"]
    detail: str = ""
    now: str = ""

    @property
    def breaks(self) -> bool:
        """True if Nightshift cannot go on as it is; what could not be looked up counts."""
        return self.state not in ("there", "moved")


def rows() -> list[Row]:
    """All expectations, as expectations.toml lists them: config keys first."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return [
        Row(user, *((name, at) if is_key else (at, name)), is_key)
        for is_key in (True, False)
        for user, lines in table["keys" if is_key else "text"].items()
        for name, at in lines.items()
    ]


def look_up(root: Path, pins: Pins) -> tuple[list[Finding], list[str]]:
    """Every row in the checkout at `root`, in their order; and its keys that are neither open nor locked.

    UsageError where that is no prime-rl, or one whose sources this Python cannot parse.
    """
    _code.cache_clear()
    schema, own = Schema(root), forced()
    findings = [
        _unseen(row, root) or (_key(row, schema, own) if row.is_key else _text(row, root, pins)) for row in rows()
    ]
    names = (path.replace(f".{ANY}", ".x") for path in schema.fields)
    closed = {n for n in names if not (variants(n) or is_inner(n) or lock(tuple(n.split("."))) or n in SHARED)}
    return findings, sorted(closed)


def report(findings: Iterable[Finding], new: Iterable[str]) -> list[str]:
    """A line for each row that breaks and for each of prime-rl's keys that nobody has decided on; then the numbers."""
    findings = list(findings)
    lines = [
        f"{f.state:<9}{f.row.user}: {' '.join(f.row.what.split())}  [{f.row.at}]  {f.detail}".rstrip()
        for f in findings
        if f.breaks
    ]
    lines += [f"new      {path}: neither open nor locked, so train.toml may not name it" for path in new]
    states = Counter(f.state for f in findings)
    numbers = ", ".join(f"{states[state]} {state}" for state in ("there", "moved", "changed", "missing", "unseen"))
    return [*lines, f"{len(findings)} expectations: {numbers}"]


def renew(findings: Iterable[Finding]) -> None:
    """Write the lines at which moved rows stand now into the table, whose rows are in the order of `findings`."""
    rest = iter(findings)
    lines = TABLE.read_text(encoding="utf-8").splitlines(keepends=True)
    found = ((line, next(rest) if line.startswith('"') else None) for line in lines)
    text = "".join(line.replace(f'"{f.row.at}"', f'"{f.now}"') if f and f.now else line for line, f in found)
    write_atomically(TABLE, text.encode())


def forced() -> dict[str, Any]:
    """Every key that the engine sets besides train.toml's, with a value that it sets; dotted."""
    settings = effective(
        parse(_FULL), rules_of(_ROOT, Chosen(environments=["gsm8k", "arithmetic"]), "prime-rl", 2), prompt_tokens=1
    )
    place: dict[str, Any] = {"run_dir": Path("/r"), "bin_dir": Path("/b"), "environment": {}, "gpu_ids": ()}
    launch = Launch(settings=settings, seed=0, ports=Ports(1, 2, 3, 4), **place)
    found = {**dict(leaves(launch.tree)), **{f"inference.{k}": v for k, v in leaves(launch.inference_json)}}
    found = {re.sub(r"\[\d+\]", "", path): value for path, value in found.items()}
    return {k: v for k, v in found.items() if not variants(k) and (not k.startswith(_OWN) or k == f"{_OWN}id")}


def _key(row: Row, schema: Schema, own: Mapping[str, Any]) -> Finding:
    # Of a key that prime-rl takes unnamed, what it says of the table.
    around = schema.fields.get(row.what.rpartition(".")[0], [])
    unnamed = [Field(f.anything, f.variants, frozenset()) for f in around if f.anything]
    fields = schema.fields.get(row.what) or unnamed
    if not fields:
        leaf = row.what.rpartition(".")[2]
        near = get_close_matches(row.what, [path for path in schema.fields if path.rpartition(".")[2] == leaf], n=1)
        return Finding(row, "missing", f"perhaps {near[0]}" if near else "")
    if row.what not in schema.fields and not row.user.endswith("passed through"):
        return Finding(row, "changed", "named no longer, but passed through as it is")
    wrong = list(dict.fromkeys(_wrong(row.what, fields, own)))
    if wrong:
        is_gone = any(not problem.startswith("default") for problem in wrong)
        return Finding(row, "missing" if is_gone else "changed", "; ".join(wrong))
    return _found(row, [field.at for field in fields])


def _wrong(path: str, fields: Iterable[Field], own: Mapping[str, Any]) -> Iterator[str]:
    """What of a key is not as we have it, for each of our entries and in each variant in which we use it."""
    for key in variants(path.replace(f".{ANY}", ".x")) or (None,):
        ours = [f for f in fields if all(f.variants[s] in _chosen(s, key, own) for s in f.variants if s != path)]
        for selector in {s for f in fields for s in f.variants} - {path}:
            there = {f.variants.get(selector, "") for f in ours}
            lost = sorted(_chosen(selector, key, own) - there)
            if lost and (key is not None or not there):  # what we force is forced in one variant
                yield f"not under {selector} = {', '.join(lost)}"
        if key is not None:
            yield from _differences(key, ours)
        elif not isinstance(value := own[path], list | dict):
            types = {kind for f in ours for kind in f.types}
            kinds = {"None"} if value is None else {"str", "Path"} if isinstance(value, str) else {type(value).__name__}
            if types and not types & kinds and value not in {choice for f in ours for choice in f.choices}:
                yield f"no value {value} in {', '.join(sorted(types))}"


def _chosen(selector: str, key: Key | None, own: Mapping[str, Any]) -> frozenset[str]:
    """The variants of a union in which we use a key below it, as values of the key that selects them."""
    tables = [key] if key is None else [key, *(k for k in KEYS if key.path.startswith(f"{k.path}."))]
    for entry in tables:
        if entry is not None and entry.only_if and entry.only_if[0] == selector:
            return frozenset(map(str, entry.only_if[1]))
    return frozenset(choice for k in variants(selector) for choice in k.choices) or frozenset({str(own.get(selector))})


def _differences(key: Key, fields: list[Field]) -> Iterator[str]:
    """What of type, choices, bounds and default differs; of a default only where both have one."""
    types = {kind for f in fields for kind in f.types}
    choices = {choice for f in fields for choice in f.choices}
    if types and _TYPES[key.kind] not in types and not (key.kind is Kind.CHOICE and "str" in types):
        yield f"type {', '.join(sorted(types))} instead of {_TYPES[key.kind]}"
    if choices and (lost := set(key.choices) - choices):
        yield f"no value {', '.join(sorted(lost))}"
    for f in fields:
        for name, bound in f.bounds.items():
            low = name in ("ge", "gt")
            ours = (key.minimum, key.above) if low else (key.maximum, key.below)
            if not any(limit is not None and (limit >= bound if low else limit <= bound) for limit in ours):
                yield f"bound {name} {bound:g}"
        is_known = f.default is not UNKNOWN and f.default is not None and key.default is not None
        if is_known and key.kind is not Kind.LIST and f.default != key.default and not key.path.endswith(".type"):
            yield f"default {f.default} instead of {key.default}"


def _text(row: Row, root: Path, pins: Pins) -> Finding:
    path = _path(row.at).rpartition(":")[0]
    text = re.sub("<([a-z_]+)>", lambda name: getattr(pins, name[1], name[0]), row.what)
    found = _lines(root / path, text)
    if not found:
        where = _elsewhere(root, _PLACES.get(row.at[:2], ""), text)
        return Finding(row, "missing", f"perhaps {where}" if where else "" if (root / path).is_file() else f"no {path}")
    return _found(row, [f"{path}:{number}" for number in found])


def _found(row: Row, places: list[str]) -> Finding:
    if _path(row.at) in places:
        return Finding(row, "there")
    now = places[0]
    for short, folder in _PLACES.items():
        now = now.replace(folder, short, 1)
    return Finding(row, "moved", f"to {now}", now)


def _unseen(row: Row, root: Path) -> Finding | None:
    is_there = not row.at.startswith("V/") or (root / _PLACES["V/"]).is_dir()
    return None if is_there else Finding(row, "unseen", f"{_PLACES['V/']} is empty: git submodule update --init")


def _elsewhere(root: Path, folder: str, text: str) -> str | None:
    """Another file of the same folder that has the text."""
    paths = sorted((root / folder).rglob("*.py")) if folder else []
    hits = (f"{path.relative_to(root)}:{lines[0]}" for path in paths if (lines := _lines(path, text)))
    return next(hits, None)


def _lines(path: Path, text: str) -> list[int]:
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


def _path(at: str) -> str:
    return _PLACES.get(at[:2], at[:2]) + at[2:]
