"""What a bundle holds, and bundles that somebody tampered with."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from nightshift import command
from nightshift.bundle import read_bundle
from nightshift.campaign.chain import sha256
from nightshift.certify.run import certify
from nightshift.cli import commands
from nightshift.errors import UsageError
from nightshift.experiment import run_experiment
from nightshift.pools import announce
from nightshift.request import Request
from nightshift.setup import Setup
from nightshift.worker import Job
from tests.bundles import (
    RULES,
    Files,
    bundled,
    make_kept,
    packed,
    unpacked,
    with_file,
    with_manifest,
)
from tests.conftest import git
from tests.stand_in_setup import make_poor


@pytest.fixture
def kept(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """A campaign with one keep."""
    return make_kept(checkout, monkeypatch)


def test_an_engine_that_there_is_not_is_one_line(kept: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    files = with_manifest(unpacked(bundled(kept)), lambda m: m.update(engine="evil"))
    path = packed(kept.root.parent / "evil.tar.gz", files)
    monkeypatch.setattr(command, "process_root", lambda: kept.root)
    done = CliRunner().invoke(commands, ["reproduce", str(path)])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.output
    assert "there is no engine 'evil'" in done.stderr


def test_the_rules_of_a_bundle_are_those_that_the_campaign_began_with(
    kept: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept.root / "rules.toml"
    committed = git(kept.root, "show", f"{kept.ledger.records()[0].commit}:rules.toml").encode()
    path.write_text('environments = ["gsm8k"]  # edited since\n')
    files = unpacked(bundled(kept))
    assert files["rules.toml"].strip() == committed.strip()
    assert "rules.toml is that of" in "".join(json.loads(files["manifest.json"])["notes"])  # its budget is a stand-in's
    monkeypatch.setattr("nightshift.export.archive._makes", lambda data, first, root: b"edited since" in data)
    files = unpacked(bundled(kept))
    assert files["rules.toml"] == path.read_bytes()
    assert "rules.toml is none that" in "".join(json.loads(files["manifest.json"])["notes"])
    monkeypatch.setattr("nightshift.export.archive._makes", lambda data, first, root: True)
    files = unpacked(bundled(kept))
    assert files["rules.toml"].strip() == committed.strip()
    assert json.loads(files["manifest.json"])["notes"] == []


def test_the_budget_is_the_records_and_of_an_old_one_the_job_that_the_chain_has(kept: Setup) -> None:
    def told() -> float | None:
        return read_bundle(bundled(kept)).manifest.budget_seconds

    path = kept.ledger.run_dir(1, 1) / "job.json"
    whole = path.read_bytes()
    announce(path.parent, msgspec.json.decode(whole, type=Job), "a worker", "local")  # which the stand-in pool does not
    assert path.read_bytes() == whole
    job = json.loads(whole)
    path.write_text(json.dumps(job | {"rules": job["rules"] | {"budget_seconds": 7.0}}))
    assert told() == 1.0
    record = json.loads((kept.ledger.run_dir(1) / "record.json").read_text())
    (kept.ledger.run_dir(1) / "record.json").write_text(json.dumps(record | {"budget_seconds": None}))
    kept.ledger._closed.clear()
    assert told() is None
    path.write_bytes(whole)
    assert told() is None
    kept.ledger.enter(path.with_name("submitted.json"))
    assert told() == 1.0


def test_nothing_kept_is_nothing_to_reproduce(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_poor(checkout, RULES, monkeypatch)
    run_experiment(Request(), setup)
    with pytest.raises(UsageError, match="nothing was kept"):
        read_bundle(bundled(setup))


def test_a_planted_certificate_is_no_claim(kept: Setup) -> None:
    made = certify(kept, num_seeds=1)
    assert read_bundle(bundled(kept)).claim.source == "certified"
    path = kept.ledger.runs_dir / "certificate.json"
    path.write_text(path.read_text().replace(str(made.difference), "0.9"))
    assert read_bundle(bundled(kept)).claim.source == "believed"


def test_a_certificate_of_the_second_in_which_the_keep_began_speaks_of_it(kept: Setup) -> None:
    began = datetime.fromisoformat(kept.ledger.records()[-1].started)
    certify(replace(kept, now=lambda: began), num_seeds=1)
    assert read_bundle(bundled(kept)).claim.source == "certified"


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def sized(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    return info


def cut_off_sparse() -> bytes:
    """The header of a sparse file, which says that a list of its parts follows; nothing does."""
    header = bytearray(special("manifest.json", tarfile.GNUTYPE_SPARSE).tobuf(tarfile.GNU_FORMAT))
    header[482], header[148:156] = 1, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)  # its checksum
    return bytes(header)


INCUMBENT = "runs/0002/train.toml"
CLOSED = b'[trainer.optim]\nlr = 3e-6\n[model]\nname = "/etc/passwd"\n'
TAMPERED: dict[str, tuple[Callable[[Files], Files], tuple[tarfile.TarInfo, ...], str]] = {
    "other bytes": (lambda f: f | {INCUMBENT: f[INCUMBENT] + b"\n"}, (), "is not what the manifest says"),
    "another config": (
        lambda f: with_file(f, INCUMBENT, f[INCUMBENT].replace(b"3e-6", b"4e-6")), (), "another config than"
    ),
    "a closed key": (lambda f: with_file(f, INCUMBENT, CLOSED), (), "runs/0002/train.toml:"),
    "a file too few": (lambda f: {n: d for n, d in f.items() if n != INCUMBENT}, (), "is missing"),
    "a file too many": (lambda f: f | {"nightshift/cli.py": b"evil"}, (), "has no place in it"),
    "traversal": (lambda f: f | {"../../evil": b"evil"}, (), "has no place in it"),
    "absolute": (lambda f: f | {"/tmp/evil": b"evil"}, (), "has no place in it"),
    "a path in a number": (lambda f: f | {"runs/0001/../../x/train.toml": b""}, (), "has no place in it"),
    "a symbolic link": (lambda f: f, (special("rules.toml", tarfile.SYMTYPE, "/etc/passwd"),), "is no plain file"),
    "a hard link": (lambda f: f, (special("rules.toml", tarfile.LNKTYPE, INCUMBENT),), "is no plain file"),
    "a device": (lambda f: f, (special("rules.toml", tarfile.CHRTYPE),), "is no plain file"),
    "a folder": (lambda f: f, (special("runs", tarfile.DIRTYPE),), "is no plain file"),
    "one twice": (lambda f: f, (sized("rules.toml", 0),), "stands there twice"),
    "a huge file": (lambda f: f, (sized("results.tsv", 40_000_000),), "40,000,000 bytes"),
    "no manifest first": (lambda f: {"x": b"", **f}, (), "not with manifest.json"),
    "a manifest of nothing": (lambda f: f | {"manifest.json": b"{}"}, (), "no bundle that can be believed"),
    "a deep manifest": (lambda f: f | {"manifest.json": b"[" * 100_000}, (), "no bundle that can be believed"),
    "another version": (lambda f: with_manifest(f, lambda m: m.update(version=2)), (), "version"),
    "an unknown field": (lambda f: with_manifest(f, lambda m: m.update(run="rm -rf /")), (), "run"),
    "an option as commit": (lambda f: with_manifest(f, lambda m: m.update(commit="--upload-pack=x")), (), "commit"),
    "a budget of years": (lambda f: with_manifest(f, lambda m: m.update(budget_seconds=1e9)), (), "budget_seconds"),
    "another engine": (lambda f: with_manifest(f, lambda m: m.update(engine="../evil")), (), "engine"),
    "a line more": (lambda f: with_manifest(f, lambda m: m.update(commit="0" * 40 + "\n")), (), "commit"),
    "a hash of two lines": (
        lambda f: with_manifest(f, lambda m: m["incumbent"].update(config_hash="0" * 64 + "\n")), (), "config_hash"
    ),
    "an interval of anything": (
        lambda f: with_manifest(f, lambda m: m["claim"].update(interval=[-9, 9])), (), "no bundle that can be"
    ),
    "an interval of nothing": (
        lambda f: with_manifest(f, lambda m: m["claim"].update(difference=0.2, interval=[0.2, 0.2])), (), "no width"
    ),
    "an interval beside it": (
        lambda f: with_manifest(f, lambda m: m["claim"].update(interval=[0.9, 1.0])), (), "does not hold"
    ),
    "a certificate from nowhere": (
        lambda f: with_manifest(f, lambda m: m["claim"].update(source="certified")), (), "no bundle that can be"
    ),
    "a number from nowhere": (
        lambda f: with_manifest(f, lambda m: m["incumbent"].update(number=99)), (), "runs/0099/train.toml is missing"
    ),
}  # fmt: skip


def test_whoever_tampered_with_a_bundle_gets_one_line(kept: Setup, tmp_path: Path) -> None:
    files = unpacked(bundled(kept))
    assert read_bundle(packed(tmp_path / "same.tar.gz", files)).configs.keys() == {"baseline", "incumbent"}
    before = {path for path in tmp_path.rglob("*") if "evil" in path.name}
    for name, (change, extra, said) in TAMPERED.items():
        path = packed(tmp_path / "hostile.tar.gz", change(dict(files)), *extra)
        with pytest.raises(UsageError) as refused:
            read_bundle(path)
        assert said in str(refused.value), (name, str(refused.value))
        assert "\n" not in str(refused.value), name
    assert {path for path in tmp_path.rglob("*") if "evil" in path.name} == before


def test_what_is_no_archive_or_never_ends_gets_one_line(kept: Setup, tmp_path: Path) -> None:
    whole = bundled(kept).read_bytes()
    path = tmp_path / "x.tar.gz"
    long_name = tarfile.TarInfo("n" * 300)
    bomb = tarfile.TarInfo("x")
    bomb.pax_headers = {"comment": "y" * 40_000_000}
    for data in (
        b"",
        b"text",
        whole[: len(whole) // 2],
        whole[:-100],
        gzip.compress(b"\0" * 5_000_000),
        gzip.compress(b"x" * 700),
        gzip.compress(cut_off_sparse()),
    ):
        path.write_bytes(data)
        with pytest.raises(UsageError, match="no bundle that can be believed"):
            read_bundle(path)
    for info, form in ((long_name, tarfile.GNU_FORMAT), (long_name, tarfile.PAX_FORMAT), (bomb, tarfile.PAX_FORMAT)):
        with pytest.raises(UsageError, match="no bundle that can be believed"):
            read_bundle(packed(path, unpacked(bundled(kept)), info, form=form))
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match="no bundle that can be believed"):
        read_bundle(path)
    path.unlink()
    path.symlink_to(bundled(kept))  # whoever named it meant what it leads to
    assert read_bundle(path).sha256 == read_bundle(bundled(kept)).sha256
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UsageError, match="no regular file"):
        read_bundle(path)


def test_zeros_without_end_are_not_unpacked(kept: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightshift.bundle.MAX_BYTES", 3_000_000)
    files = unpacked(bundled(kept))
    extra = [sized(f"runs/{number:04d}/record.json", 1_000_000) for number in range(1000, 1010)]
    zeros = sha256(bytes(1_000_000))
    files = with_manifest(files, lambda m: m["files"].update({info.name: zeros for info in extra}))
    with pytest.raises(UsageError, match=r"than a bundle may|larger than a bundle"):
        read_bundle(packed(tmp_path / "x.tar.gz", files, *extra))
