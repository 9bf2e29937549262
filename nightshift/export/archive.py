"""The bundle: a campaign in one .tar.gz, with what it claims and the command that reproduces it. bundle.py reads it.

The same records give the same bytes: files are sorted, and have no times and no owners.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import msgspec

from nightshift.bundle import (
    CERTIFICATE_NAME,
    MANIFEST_NAME,
    MAX_BYTES,
    MAX_FILE_BYTES,
    MAX_FILES,
    RULES_NAME,
    Claim,
    Manifest,
    Side,
    check_interval,
    possible,
)
from nightshift.campaign.chain import CHAIN_NAME, sha256
from nightshift.campaign.ledger import RECORD_NAME
from nightshift.campaign.results import columns, row
from nightshift.engines.memory import on_cards
from nightshift.entry import FIXED_VARIABLES
from nightshift.errors import EngineError, UsageError
from nightshift.export.private import Private
from nightshift.export.story import Story
from nightshift.files import read_file
from nightshift.git.repo import CONFIG_NAME, Repo
from nightshift.processes.gpus import num_gpus
from nightshift.records import Record
from nightshift.report.data import gather
from nightshift.rules_toml import chosen_in, rules_of
from nightshift.text import clean

_README = """# {tag}: a campaign of Nightshift

{claim}

To reproduce it, in a clone of the repository that it was made with, whose commit {commit} you have:

    git switch --detach {commit}
    uv run prepare.py
    uv run {command}

That trains baseline and incumbent with fresh seeds and says whether the gain holds (exit 0), does not (3), or is left
open by so few seeds (4). `manifest.json` has the sha256 of every file here, `chain.jsonl` that of every record as it
was written{redacted}.

{rules}.
"""
_UNLIKE = "by that rules.toml this machine has other rules than the campaign had"


def as_archive(story: Story, root: Path, private: Private, name: str) -> bytes:
    """The bytes of the bundle that is to be called `name`. UsageError where a record cannot be put into it."""
    claim, notes = claim_of(story), list[str]()
    files = _files(story, root, claim, notes)
    plain = {path: private.data(data) for path, data in files.items()}
    redacted = tuple(sorted(path for path, data in files.items() if plain[path] != data))
    manifest = _manifest(story, claim, redacted, name, private, notes)
    plain["README.md"] = private.text(_readme(story, manifest)).encode()
    for path, data in plain.items():
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(
                f"{path} has {len(data):,} bytes, too many for a bundle", "Move that experiment out of runs/."
            )
    if (size := sum(map(len, plain.values()))) > MAX_BYTES or len(plain) > MAX_FILES:
        cause = f"{len(plain):,} files of {size:,} bytes are too many for a bundle"
        raise UsageError(cause, "Move experiments that decide nothing, such as crashes, out of runs/.")
    manifest = msgspec.structs.replace(manifest, files={path: sha256(data) for path, data in sorted(plain.items())})
    head = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    try:
        msgspec.json.decode(head, type=Manifest)
        if claim is not None:
            check_interval(claim)
    except ValueError as error:  # a record lies where agents write
        raise UsageError(
            f"a record cannot be put into a bundle: {error}", "nightshift verify says what changed."
        ) from None
    return _packed({MANIFEST_NAME: head, **dict(sorted(plain.items()))})


def _files(story: Story, root: Path, claim: Claim | None, notes: list[str]) -> dict[str, bytes]:
    """By name, as they lie there: what cannot be read is left out, and `notes` have it."""
    ledger, records, found = story.ledger, story.shown.records, dict[str, bytes]()
    for record in records:
        for name in (RECORD_NAME, CONFIG_NAME):
            _add(found, f"runs/{record.number:04d}/{name}", ledger.run_dir(record.number) / name)
        if f"runs/{record.number:04d}/{CONFIG_NAME}" not in found:
            notes.append(f"runs/{record.number:04d}/{CONFIG_NAME} could not be read")
    _add(found, CHAIN_NAME, ledger.runs_dir / CHAIN_NAME)
    rules_toml, note = _rules_toml(story, root)
    found |= {} if rules_toml is None else {RULES_NAME: rules_toml}
    notes += [note] if note else []
    if claim is not None and claim.source == "certified":
        _add(found, CERTIFICATE_NAME, ledger.runs_dir / CERTIFICATE_NAME)
    header = columns(records)
    found["results.tsv"] = ("\n".join(["\t".join(header), *(row(each, header) for each in records)]) + "\n").encode(
        errors="replace"
    )
    found["environment.json"] = msgspec.json.format(msgspec.json.encode(_environment(records)), indent=1)
    return found


def _rules_toml(story: Story, root: Path) -> tuple[bytes | None, str]:
    """The one that the campaign ran by, and what is to be said of it: that of the commit where it began, unless only
    the one that lies here, which nobody may have committed, makes the campaign's rules."""
    first, here = _first(story), dict[str, bytes]()
    _add(here, RULES_NAME, root / RULES_NAME)
    committed = None
    with suppress(UsageError, EngineError):  # no git, or not that commit
        committed = Repo(root).file_at(first.commit, RULES_NAME) if first.commit else None
    for data in dict.fromkeys(each for each in (committed, here.get(RULES_NAME)) if each is not None):
        if _makes(data, first, root):
            note = "" if data == committed else f"{RULES_NAME} is none that {first.commit or 'a commit'} has"
            return data, note
    if committed is None:
        return None, f"{RULES_NAME} is left out: the commit where the campaign began has none that can be read"
    return committed, f"{RULES_NAME} is that of {first.commit}: {_UNLIKE}"


def _makes(rules_toml: bytes, first: Record, root: Path) -> bool:
    """Whether this checkout and machine have the campaign's rules by that text."""
    with suppress(UsageError, EngineError, OSError):
        rules = rules_of(root, chosen_in(root, rules_toml), first.engine, num_gpus(os.environ))
        rules = on_cards(rules, root, os.environ, None)
        budget = rules.budget_seconds if first.budget_seconds is None else first.budget_seconds
        return rules.with_budget(budget).hash(root) == first.rules_hash
    return False


def _first(story: Story) -> Record:
    """The experiment that the campaign began with."""
    return story.shown.campaign.kept[0] if story.shown.campaign.kept else story.shown.records[0]


def _add(found: dict[str, bytes], name: str, path: Path) -> None:
    try:
        found[name] = read_file(path)
    except OSError:
        return


def _environment(records: tuple[Record, ...]) -> dict[str, object]:
    """What ran: by name the versions that the runs recorded, and the machine; the loader's path is this machine's."""
    versions: dict[str, list[str]] = {}
    for record in records:
        for named in (record.versions, *(run.versions for run in record.runs)):
            for name, version in named.items():
                if name != FIXED_VARIABLES[0] and version not in versions.setdefault(clean(name), []):
                    versions[clean(name)].append(clean(version))
    machines = sorted({clean(record.hardware) for record in records})
    commits = sorted({record.commit for record in records if record.commit})
    return {"versions": dict(sorted(versions.items())), "hardware": machines, "commits": commits}


def _certificate_of(story: Story) -> Claim | None:
    """What was certified of the incumbent of now; None where nothing was, or of another one, or where the certificate
    is not as the chain has it: it lies where agents write."""
    path = story.ledger.runs_dir / CERTIFICATE_NAME
    morning = gather(story.ledger, story.shown.branch, story.shown.branch)
    made = morning.certificate
    if made is None or morning.obsolete or not story.ledger.holds(path):
        return None
    return Claim(
        source="certified", difference=made.difference, interval=possible(made.interval),
        num_seeds=min(min(made.num_seeds.values()), 100),
    )  # fmt: skip


def claim_of(story: Story) -> Claim | None:
    """What the campaign says of its incumbent's gain on the baseline; None where nothing was kept."""
    campaign = story.shown.campaign
    if campaign.incumbent is None or campaign.standing is None or campaign.incumbent is campaign.kept[0]:
        return None
    believed = campaign.standing
    return _certificate_of(story) or Claim(
        source="believed", difference=believed.difference, interval=possible(believed.difference_interval)
    )


def _manifest(
    story: Story, claim: Claim | None, redacted: tuple[str, ...], name: str, private: Private, notes: list[str]
) -> Manifest:
    shown, campaign, first = story.shown, story.shown.campaign, _first(story)
    incumbent = campaign.incumbent if claim else None
    rules, budget = None if first.budget_seconds else story.rules(first), first.budget_seconds
    return Manifest(
        nightshift=metadata.version("nightshift"),
        branch=clean(shown.branch),
        engine=clean(first.engine),
        rules_name=clean(first.rules_name),
        rules_hash=clean(shown.rules_hash),
        budget_seconds=rules.budget_seconds if rules else budget,
        commit=first.commit,
        harness_tree=clean(first.harness_tree),
        hardware=private.text(clean(first.hardware)),
        chain=story.ledger.chain.head,
        baseline=_side(first) if campaign.kept else None,
        incumbent=_side(incumbent) if incumbent else None,
        claim=claim,
        reproduce=f"nightshift reproduce {name}",
        redacted=redacted,
        notes=tuple(private.text(clean(note)) for note in (*shown.notes, *notes)),
        files={},
    )


def _side(record: Record) -> Side:
    return Side(number=record.number, config_hash=record.config_hash)


def _readme(story: Story, manifest: Manifest) -> str:
    claim = "Nothing was kept: there is no gain to reproduce."
    if manifest.claim is not None and manifest.incumbent is not None:
        claim = f"Experiment {manifest.incumbent.number:04d}: {manifest.claim}: {manifest.claim.source}."
    told = "; paths and secrets were replaced in those that the manifest calls redacted" if manifest.redacted else ""
    words = {"commit": manifest.commit or "(none)", "command": manifest.reproduce, "redacted": told}
    words["rules"] = next((n for n in manifest.notes if n.startswith(RULES_NAME)), f"`{RULES_NAME}` is the campaign's")
    return _README.format(tag=story.tag, claim=claim, **words)


def _packed(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()
