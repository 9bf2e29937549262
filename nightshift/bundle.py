"""A campaign in one file, as somebody else gets it: what the manifest says, and how a hostile one is read.

A bundle is a .tar.gz of regular files with known names, the manifest first, which has the sha256 of each of the others.
Nothing of it is unpacked on the disk: what is asked for is read into memory, within bounds, the rest is hashed.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Self

import msgspec
from msgspec import Meta

from nightshift.errors import ConfigError, UsageError, listed
from nightshift.files import open_regular
from nightshift.text import clean
from nightshift.train_toml.config import Config, parse

MANIFEST_NAME, CERTIFICATE_NAME, RULES_NAME = "manifest.json", "certificate.json", "rules.toml"
MAX_FILE_BYTES = 32 * 1024 * 1024  # of one file in it, as it is written
MAX_BYTES = 1024 * 1024 * 1024  # of all of them
MAX_FILES = 50_000
_NAME = re.compile(r"README\.md|results\.tsv|environment\.json|chain\.jsonl|certificate\.json|rules\.toml"
                   r"|runs/[0-9]{4,9}/(?:record\.json|train\.toml)")  # fmt: skip
_FIX = "Make it again: uv run nightshift export --to bundle."

Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Difference = Annotated[float, Meta(ge=-1, le=1)]
Text = Annotated[str, Meta(max_length=1000)]
Number = Annotated[int, Meta(ge=1, le=999_999_999)]


class Side(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the two that are compared: its experiment, and the hash of what its train.toml trains."""

    number: Number
    config_hash: Sha256


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Incumbent minus baseline, a fraction, with its 95 % interval: `certified` by fresh seeds on sealed examples, or
    only `believed` after the experiments. `num_seeds`: runs of each side that a certificate compared."""

    source: Literal["certified", "believed"]
    difference: Difference
    interval: tuple[Difference, Difference]
    num_seeds: Annotated[int, Meta(ge=1, le=100)] | None = None

    def __str__(self) -> str:
        low, high = (100 * end for end in self.interval)
        return f"{100 * self.difference:+.1f} pp over the baseline, 95 % interval {low:+.1f} to {high:+.1f} pp"


def possible(interval: tuple[float, float]) -> tuple[float, float]:
    """What of an interval two scores can differ by: that of few runs goes beyond it."""
    low, high = (min(max(end, -1.0), 1.0) for end in interval)
    return low, high


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="bundle"):
    """`commit`: where the campaign began, whose code and rules are needed to reproduce it. `redacted`: files in which
    paths of the machine and secrets were replaced, so that the chain has another hash of them. `reproduce`: the
    command. `incumbent` and `claim` are null where nothing was kept."""

    version: Literal[1] = 1
    nightshift: Text
    branch: Text
    engine: Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9-]{0,40}\Z")]
    rules_name: Text
    rules_hash: Text
    budget_seconds: Annotated[float, Meta(ge=1, le=86_400)] | None
    commit: Annotated[str, Meta(pattern=r"\A[0-9a-f]{40,64}\Z")] | None
    harness_tree: Text
    hardware: Text
    chain: Text
    baseline: Side | None
    incumbent: Side | None
    claim: Claim | None
    reproduce: Text
    redacted: tuple[Text, ...] = ()
    notes: tuple[Text, ...] = ()
    files: dict[str, Sha256]


@dataclass(frozen=True, slots=True)
class Bundle:
    """One that was read and checked. `sha256`: of the file; `configs`: by side, `baseline` and `incumbent`."""

    path: Path
    sha256: str
    manifest: Manifest
    configs: dict[str, Config]
    rules_toml: bytes

    @property
    def claim(self) -> Claim:
        """What is to be reproduced; a bundle without one is not read."""
        assert self.manifest.claim is not None
        return self.manifest.claim


class _Certificate(msgspec.Struct, frozen=True):
    """What of a certificate is compared with the claim."""

    branch: str
    rules_hash: str
    difference: float
    interval: tuple[float, float]


def read_bundle(path: Path) -> Bundle:
    """All of a bundle that can be reproduced, checked: names, sizes, hashes, configs against the allow-list. A link to
    it is followed: a person named it.

    UsageError for a file that is none, for one that was changed, and where nothing was kept.
    """
    try:
        with open_regular(os.path.realpath(path)) as file:
            digest = _digest(file)
            file.seek(0)
            with _opened(file) as archive:
                manifest, kept = _checked(archive)
        if manifest.baseline is None or manifest.incumbent is None or manifest.claim is None or not manifest.commit:
            raise UsageError(
                f"{path}: nothing was kept in {clean(manifest.branch)}", "Reproduce a campaign with a gain."
            )
        sides = {"baseline": manifest.baseline, "incumbent": manifest.incumbent}
        configs = {side: _config(path, each, kept) for side, each in sides.items()}
        _check_claim(manifest, kept)
    except (OSError, EOFError, ValueError, RecursionError, tarfile.TarError, zlib.error, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"{path} is no bundle that can be believed: {clean(str(reason), 300)}", _FIX) from None
    return Bundle(path, digest, manifest, configs, kept.get(RULES_NAME, b""))


def _digest(file: BinaryIO) -> str:
    found = hashlib.sha256()
    while data := file.read(1 << 20):
        found.update(data)
    return found.hexdigest()


class _Bounded:
    """What tarfile reads from: no more at once than one file may have, no more in all than a bundle may."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_FILE_BYTES or self._file.tell() + size > MAX_BYTES + MAX_FILE_BYTES:
            raise ValueError("it asks for more memory than a bundle may")
        return self._file.read(size)

    def seek(self, place: int, whence: int = 0) -> int:
        if whence != 0 or not 0 <= place <= MAX_BYTES:
            raise ValueError("it is larger than a bundle may be")
        return self._file.seek(place)

    def tell(self) -> int:
        return self._file.tell()


class _Plain(tarfile.TarInfo):
    """One file of it. Any other kind is refused before tarfile reads what its header announces: a sparse file's list of
    parts alone would take gigabytes, and one that is cut off has an IndexError."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Of the block that is its header. ValueError."""
        found = super().frombuf(buf, encoding, errors)
        if found.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise ValueError(f"{found.name!a} is no plain file")
        return found


@contextmanager
def _opened(file: BinaryIO) -> Iterator[tarfile.TarFile]:
    with gzip.GzipFile(fileobj=file) as unpacked:
        bounded: Any = _Bounded(unpacked)
        with tarfile.open(fileobj=bounded, mode="r:", tarinfo=_Plain) as archive:
            yield archive


def _checked(archive: tarfile.TarFile) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest and the files that are read, by name. ValueError for anything that no export has written."""
    manifest: Manifest | None = None
    seen, kept = set[str](), dict[str, bytes]()
    while (member := archive.next()) is not None:
        name = member.name
        if not 0 <= member.size <= MAX_FILE_BYTES or len(seen) >= MAX_FILES:
            raise ValueError(f"{name!a} has {member.size:,} bytes, or is one file too many")
        stream = archive.extractfile(member)
        data = stream.read(member.size) if stream else b""
        if manifest is None:
            if name != MANIFEST_NAME:
                raise ValueError(f"it begins with {name!a}, not with {MANIFEST_NAME}")
            manifest = msgspec.json.decode(data, type=Manifest)
            continue
        if not _NAME.fullmatch(name) or name in seen:
            raise ValueError(f"{name!a} has no place in it, or stands there twice")
        seen.add(name)
        if hashlib.sha256(data).hexdigest() != manifest.files.get(name):
            raise ValueError(f"{name} is not what the manifest says")
        if name in (CERTIFICATE_NAME, RULES_NAME) or name in _config_names(manifest):
            kept[name] = data
    if manifest is None:
        raise ValueError("it is empty")
    if missing := sorted(manifest.files.keys() - seen):
        raise ValueError(f"{listed(missing)} is missing")
    return manifest, kept


def _config_names(manifest: Manifest) -> set[str]:
    sides = (manifest.baseline, manifest.incumbent)
    return {f"runs/{side.number:04d}/train.toml" for side in sides if side is not None}


def _config(path: Path, side: Side, kept: dict[str, bytes]) -> Config:
    """The train.toml of one side, by the same checks as one that is run here."""
    name = f"runs/{side.number:04d}/train.toml"
    if name not in kept:
        raise ValueError(f"{name} is missing")
    try:
        config = parse(kept[name], name)
    except ConfigError as error:
        raise UsageError(
            f"{path}: {error.cause}", "Nothing but an open key is trained: get the bundle again."
        ) from None
    if config.hash != side.config_hash:
        raise ValueError(f"{name} is another config than the manifest names")
    return config


def check_interval(claim: Claim) -> None:
    """ValueError for one that nothing measures."""
    low, high = claim.interval
    if not low <= claim.difference <= high:
        raise ValueError("its interval does not hold its difference")
    if low == high:
        raise ValueError(f"its interval of {low:+g} alone has no width: nothing is measured so surely")


def _check_claim(manifest: Manifest, kept: dict[str, bytes]) -> None:
    """ValueError where the claim is not the certificate's."""
    claim = manifest.claim
    assert claim is not None
    check_interval(claim)
    if claim.source == "certified":
        found = msgspec.json.decode(kept.get(CERTIFICATE_NAME, b""), type=_Certificate)
        known = (manifest.branch, manifest.rules_hash, claim.difference, claim.interval)
        if (found.branch, found.rules_hash, found.difference, possible(found.interval)) != known:
            raise ValueError("the certificate in it is not of what it claims")
