"""What differs from the chain, in plain lines; and what a start does about a chain that a kill or a hand has cut.

A record may lack its first line, or its last one if that would be the chain's: a kill came between. `resume_chain`
enters those, as not witnessed, if their beginning is entered; a record that was never begun is never entered.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from nightshift.campaign.git import CONFIG_NAME
from nightshift.campaign.index import contradictions
from nightshift.campaign.journal import Entry, digests, entry_of, sha256
from nightshift.campaign.ledger import RECORD_NAME, STARTED, Ledger
from nightshift.campaign.records import JOB_NAME, Record
from nightshift.campaign.scores import run_scores
from nightshift.errors import UsageError, listed
from nightshift.files import Document, read_file

LOOKS_NAME = "sealed-looks.jsonl"
_ENTERED_FILES = (
    LOOKS_NAME,
    "certify/*/plan.json",
    "certify/*/comparison.json",
    "certify/*/*/run.json",
    f"*/{JOB_NAME}",
    f"certify/*/*/{JOB_NAME}",
)
_ASIDE = "chain.damaged"
_ABSENT = "absent"
_ENTERED = re.compile(rb'"([0-9]{4,9})(?: late)?":')
_OF_A_RECORD = re.compile(rf"([0-9]{{4,9}})(?:/{re.escape(CONFIG_NAME)}| late)?")
_OF_A_RUN = re.compile(rf"([0-9]{{4,9}})/{re.escape(JOB_NAME)}")


def resume_chain(ledger: Ledger, note: Callable[[str], None]) -> list[Record]:
    """Begin a chain where there is none, or none that can be gone on with; enter what a kill left out. The records.

    Call as the head, with the lock held. EngineError when the disk refuses, UsageError for a damaged record.
    """
    try:
        lines = ledger.journal.lines()
        _ = [entry_of(line) for line in lines[-1:]]
    except (OSError, ValueError) as error:
        number = sum(1 for _ in ledger.runs_dir.glob(f"{_ASIDE}-*")) + 1
        aside = ledger.journal.path.rename(ledger.runs_dir / f"{_ASIDE}-{number}")
        note(f"{ledger.journal.path} is damaged: {error}. Kept as {aside}; a new chain begins (nightshift verify)")
        lines = []
    records = ledger.records()
    if lines:
        entered = [int(number) for line in lines for number in _ENTERED.findall(line)]
        for record in _open(records, entered):
            begun = f"{record.number:04d}/{CONFIG_NAME}"
            is_begun = any(f'"{begun}":'.encode() in line for line in lines)
            if record.status == STARTED or is_begun:
                _enter(ledger, _files(record, ledger))
    else:
        files = {name: digest for record in records for name, digest in _files(record, ledger).items()}
        # What a worker was given is believed because it was entered before the start: no later entry makes up for that.
        names = (name for name in _entered_files(ledger) if not name.endswith(JOB_NAME))
        _enter(ledger, files | {name: _hash(ledger, name) for name in names})
    return records


def _enter(ledger: Ledger, files: Mapping[str, str]) -> None:
    ledger.journal.enter({name: sha for name, sha in files.items() if sha != _ABSENT}, witnessed=False)


def _number(name: str) -> int | None:
    """Of the experiment that an entry of this name is of; None for looks and certificates."""
    match = _OF_A_RECORD.fullmatch(name)
    return int(match[1]) if match else None


def _open(records: Sequence[Record], entered: Sequence[int]) -> list[Record]:
    """Those that were never entered, and the last that was: what a killed head may have had in its hands."""
    return [record for record in records if record.number not in entered or record.number == entered[-1]]


def _files(record: Record, ledger: Ledger) -> dict[str, str]:
    """What the chain should hold of an experiment as it lies there: _ABSENT for what cannot be read any more."""
    folder = ledger.run_dir(record.number)
    name = f"{folder.name}/{CONFIG_NAME}"
    try:
        decided = digests(record.number, read_file(folder / RECORD_NAME))
    except (OSError, ValueError):
        decided = {folder.name: _ABSENT}
    return {name: _hash(ledger, name), **(decided if record.status != STARTED else {})}


def _hash(ledger: Ledger, name: str) -> str:
    """Of a file in runs/; _ABSENT where it is none that can be read."""
    try:
        return sha256(read_file(ledger.runs_dir / name))
    except OSError:
        return _ABSENT


def _entered_files(ledger: Ledger) -> list[str]:
    paths = (path for pattern in _ENTERED_FILES for path in ledger.runs_dir.glob(pattern))
    return sorted(path.relative_to(ledger.runs_dir).as_posix() for path in paths)


class Findings(Document, frozen=True, kw_only=True, tag="verify"):
    """What `nightshift verify` says: `problems` are none of the harness's doing, `notes` may be. `chain`: its head."""

    chain: str
    num_lines: int
    problems: list[str]
    notes: list[str]


def verify(ledger: Ledger, head: str | None = None) -> Findings:
    """Compare runs/ with its chain, and the chain with a `head` (its first digits) that was noted elsewhere."""
    try:
        lines, problems = ledger.journal.lines(), list[str]()
    except OSError as error:
        lines, problems = [], [f"{ledger.journal.path.name} cannot be read: {error.strerror}"]
    found = Findings(chain=ledger.journal.head, num_lines=len(lines), problems=problems, notes=[])
    if head is not None and not any(sha256(line).startswith(head.lower()) for line in lines):
        found.problems.append(f"no line of the chain has the hash {head}: it was cut or rewritten since that was noted")
    entered: dict[str, list[tuple[int, str]]] = defaultdict(list)  # by name: where, and its sha256
    for place, entry in _walk(lines, found):
        for name, digest in entry.files.items():
            entered[name].append((place, digest))
        if not entry.witnessed:
            whose = ((name, _number(name)) for name in entry.files)
            names = dict.fromkeys(name if number is None else f"experiment {number:04d}" for name, number in whose)
            found.notes.append(f"line {place}: {listed([*names])} entered by a later start, witnessed by nobody")
    records, damaged = ledger.readable()
    problems += damaged
    _compare_records(ledger, records, entered, found)
    _compare_files(ledger, {record.number for record in records if record.result}, entered, found)
    for record in records:
        try:
            _ = record.evaluation and run_scores(record)
        except UsageError as error:
            found.problems.append(error.cause)
    problems += _unlike_their_baselines(records)
    problems += contradictions(ledger, records)
    known = {f"{number:04d}" for number in ledger.numbers() if (ledger.run_dir(number) / RECORD_NAME).exists()}
    strange = sorted({path.name for path in ledger.runs_dir.glob("*") if path.name.strip().isdigit()} - known)
    problems += [f"runs/{n!a} looks like an experiment and has no record: nothing reads it" for n in strange]
    problems += [f"runs/{p.name}: a damaged chain was set aside" for p in ledger.runs_dir.glob(f"{_ASIDE}-*")]
    return found


def _unlike_their_baselines(records: Sequence[Record]) -> Iterator[str]:
    """The campaigns that say to have begun with runs that were made before, and did not."""
    by_number = {record.number: record for record in records}
    for record in (record for record in records if record.baseline is not None and record.is_keep):
        made = by_number.get(record.baseline or 0)
        if made is None or (made.result, made.config_hash, made.rules_hash) != (
            record.result, record.config_hash, record.rules_hash,
        ):  # fmt: skip
            yield f"experiment {record.number:04d} has not the result of {record.baseline:04d}, as it says"


def _walk(lines: Sequence[bytes], found: Findings) -> Iterator[tuple[int, Entry]]:
    """The entries, with their line numbers; what is wrong with their order goes into `found`."""
    seen: dict[bytes, int] = {}
    expected, before = 1, ""
    for place, line in enumerate(lines, 1):
        try:
            entry = entry_of(line)
        except ValueError as error:
            found.problems.append(f"line {place} of the chain is no entry: {error}")
            before, expected = sha256(line), expected + 1
            continue
        if line in seen:
            found.problems.append(f"line {place} of the chain repeats line {seen[line]}")
        elif entry.index > expected:
            found.problems.append(f"before line {place} of the chain {entry.index - expected} are missing")
        elif entry.index < expected:
            found.problems.append(f"line {place} of the chain stands in the wrong place: it was line {entry.index}")
        elif entry.before != before:
            found.problems.append(f"line {place - 1} of the chain was changed after line {place} was written, or both")
        seen.setdefault(line, place)
        before, expected = sha256(line), entry.index + 1
        yield place, entry


def _compare_records(
    ledger: Ledger, records: Sequence[Record], entered: Mapping[str, list[tuple[int, str]]], found: Findings
) -> None:
    say = found.problems.append
    order = sorted((places[-1][0], name) for name, places in entered.items() if not name.endswith(CONFIG_NAME))
    numbers = [number for _, name in order if (number := _number(name)) is not None]
    there, is_open = set(ledger.numbers()), {record.number for record in _open(records, numbers)}
    for number in sorted({n for name in entered if (n := _number(name)) is not None} - there):
        say(f"experiment {number:04d} was deleted, or moved out of runs/")
    for record in records:
        name = f"{record.number:04d}"
        begun, decided = entered.get(f"{name}/{CONFIG_NAME}", []), entered.get(name, [])
        if len(begun) > 1:
            say(f"experiment {name} was begun {len(begun)} times: an earlier one of this number was deleted")
        if len(decided) > 1:
            say(f"experiment {name} was decided {len(decided)} times: lines {', '.join(str(p) for p, _ in decided)}")
        if record.status == STARTED and decided:
            say(f"experiment {name} was decided, and says now that it was not")
        if not begun and (record.status != STARTED or record is not records[-1]):
            say(f"experiment {name} is not in the chain: invented, or copied into runs/")
            continue
        for entry, digest in _files(record, ledger).items():
            place, was = entered.get(entry, [(0, "")])[-1]
            what = {name: "its record", f"{name} late": "its settlement or lesson"}.get(entry, entry)
            if record.number in is_open and (not was or (was != digest and entry.endswith(" late"))):
                found.notes.append(f"experiment {name}: {what} is not entered yet: the next start does that")
            elif not was:
                say(f"experiment {name}: {what} was never entered")
            elif was != digest:
                say(f"experiment {name}: {what} was changed since line {place} of the chain")


def _compare_files(
    ledger: Ledger, collected: Collection[int], entered: Mapping[str, list[tuple[int, str]]], found: Findings
) -> None:
    """Looks, certificates, and what workers were given. The file of looks grows, by a line that a kill may have kept
    out of the chain; what a worker was given counts once its run was collected, and may be made anew before."""
    there = _entered_files(ledger)
    for name in sorted({*there, *(n for n in entered if _number(n) is None and not n.startswith("."))}):
        say, was = found.problems.append, entered.get(name)
        if name.endswith(JOB_NAME) and not _is_collected(name, collected, entered):
            say = found.notes.append
        if was is None:
            say(f"runs/{name} is not in the chain: invented, or copied into runs/")
        elif _hash(ledger, name) == _ABSENT:
            say(f"runs/{name} was deleted")
        elif len(was) > 1 and name.endswith("/run.json"):
            say(f"runs/{name} was made {len(was)} times: an earlier one was deleted")
        elif _hash(ledger, name) != was[-1][1] and not (name == LOOKS_NAME and _began_as(was[-1][1], ledger)):
            say(f"runs/{name} was changed since line {was[-1][0]} of the chain")


def _is_collected(name: str, collected: Collection[int], entered: Mapping[str, object]) -> bool:
    """Of what a worker was given, by its place in runs/: whether its run is part of a record or a certificate. Not so
    of an experiment that is gone, which is told by itself, or of which a chain begun anew knows no start."""
    if (match := _OF_A_RUN.fullmatch(name)) is None:
        return name.replace(JOB_NAME, "run.json") in entered
    return name in entered and int(match[1]) in collected


def _began_as(digest: str, ledger: Ledger) -> bool:
    try:
        data = read_file(ledger.runs_dir / LOOKS_NAME)
    except OSError:
        return False
    so_far = hashlib.sha256()
    for line in data.splitlines(keepends=True):
        so_far.update(line)
        if so_far.hexdigest() == digest:
            return True
    return False
