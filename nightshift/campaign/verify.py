"""What differs between runs/ and its journal, in plain lines; and what a start does about a journal that a kill cut.

A kill may come between the writing of a file and its line. `resume_journal` adds that line, as recovered, if the
journal holds the beginning of the same experiment.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from nightshift.campaign.campaign import contradictions
from nightshift.campaign.git import CONFIG_NAME
from nightshift.campaign.journal import ASIDE, JOURNAL_NAME, Line, line_of, record_sha256, sha256
from nightshift.campaign.ledger import (
    COMPARISON_NAME,
    EVENTS,
    PLAN_NAME,
    RECORD_NAME,
    RUN_NAME,
    STARTED,
    Ledger,
)
from nightshift.campaign.records import JOB_NAME, Record
from nightshift.campaign.scores import run_scores
from nightshift.errors import UsageError, listed
from nightshift.files import Document, read_file
from nightshift.text import clean

_OF_AN_EXPERIMENT = re.compile(r"([0-9]{4,9})/([^/]+)")
_MAX_READINGS = 10  # of all records, until no line was added meanwhile
Places = Mapping[str, Sequence[tuple[int, Line]]]  # by file: the lines about it, with their places from 1


def resume_journal(ledger: Ledger, note: Callable[[str], None]) -> list[Record]:
    """Begin a journal if there is none that lines can be added to; add the lines that a kill prevented.

    Returns the records. Call as the controller, with the lock held. EngineError; UsageError for a damaged record.
    """
    try:
        lines = ledger.journal.lines()
        _ = [line_of(line) for line in lines[-1:]]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        number = sum(1 for _ in ledger.runs_dir.glob(f"{ASIDE}-*")) + 1
        aside = ledger.journal.path.rename(ledger.runs_dir / f"{ASIDE}-{number}")
        note(f"{ledger.journal.path} is damaged: {reason}. Kept as {aside.name}; a new journal begins")
        lines = []
    records, places = ledger.records(), _places(lines)
    for record in records:
        folder = ledger.run_dir(record.number)
        is_begun, is_decided = (f"{folder.name}/{name}" in places for name in (CONFIG_NAME, RECORD_NAME))
        if not lines or (not is_begun and record.status == STARTED):
            _recover(ledger, f"{folder.name}/{CONFIG_NAME}")
        if record.status != STARTED and not is_decided and (is_begun or not lines):
            _recover(ledger, f"{folder.name}/{RECORD_NAME}")
    for file in _other_files(ledger) if not lines else ():
        # A job.json is trusted because its line was there before its worker started. A later line proves nothing.
        if not file.endswith(JOB_NAME):
            _recover(ledger, file)
    return records


def _recover(ledger: Ledger, file: str) -> None:
    if (digest := _sha256(ledger, file)) is not None:
        ledger.journal.add(EVENTS[file.rpartition("/")[2]], file, digest, recovered=True)


def _sha256(ledger: Ledger, file: str) -> str | None:
    """The hash of a file in runs/ as its line holds it; None if the file cannot be read."""
    try:
        data = read_file(ledger.runs_dir / file)
        return record_sha256(data) if file.endswith(f"/{RECORD_NAME}") else sha256(data)
    except (OSError, ValueError):
        return None


def _other_files(ledger: Ledger) -> list[str]:
    """The jobs of experiments, and all of certificates that has a line."""
    names = [name for name in EVENTS if name not in (CONFIG_NAME, RECORD_NAME)]
    patterns = [f"*/{JOB_NAME}", *(f"certify/*/{name}" for name in names), *(f"certify/*/*/{name}" for name in names)]
    paths = (path for pattern in patterns for path in ledger.runs_dir.glob(pattern))
    return sorted(path.relative_to(ledger.runs_dir).as_posix() for path in paths)


def _places(lines: Sequence[bytes]) -> Places:
    """The lines that can be read, by the file that they speak of."""
    places: dict[str, list[tuple[int, Line]]] = defaultdict(list)
    for place, data in enumerate(lines, 1):
        with suppress(ValueError):
            line = line_of(data)
            places[line.file].append((place, line))
    return places


class Findings(Document, frozen=True, kw_only=True, tag="verify"):
    """What `nightshift verify` says. `problems` are never Nightshift's own doing, `notes` may be. `head`: of the
    journal."""

    head: str
    num_lines: int
    problems: list[str]
    notes: list[str]


def verify(ledger: Ledger, head: str | None = None) -> Findings:
    """Compare runs/ with its journal, and the journal with a `head` (its first digits) that was noted elsewhere."""
    try:
        lines = ledger.journal.lines()
        for _ in range(_MAX_READINGS):  # a controller may write meanwhile
            (records, problems), files, before = ledger.readable(), _other_files(ledger), lines
            if (lines := ledger.journal.lines()) == before:
                break
    except OSError as error:
        records, problems = ledger.readable()
        problems.append(f"{ledger.journal.path} cannot be read: {error.strerror}. So nothing can be compared with it")
        return Findings(head="", num_lines=0, problems=problems, notes=[])
    found = Findings(head=ledger.journal.head, num_lines=len(lines), problems=problems, notes=[])
    if ledger.journal.is_cut():
        found.notes.append(f"the last line of {JOURNAL_NAME} has no end: it was cut, perhaps by a kill")
    if head is not None and not any(sha256(line).startswith(head.lower()) for line in lines):
        problems.append(f"no line has the hash {head}: the journal was cut or rewritten since that was noted")
    problems += _order_problems(lines)
    places = _places(lines)
    recovered = [file for file, about in places.items() if any(line.recovered for _, line in about)]
    if recovered:
        names = listed([clean(file) for file in recovered])
        found.notes.append(f"{names}: written by a later start, after a kill or because the journal was gone")
    _compare_experiments(ledger, records, places, found)
    _compare_other_files(ledger, files, {record.number for record in records if record.result}, places, found)
    for record in records:
        try:
            _ = record.evaluation and run_scores(record)
        except UsageError as error:
            problems.append(error.cause)
    if ledger.numbers() == list(range(1, len(records) + 1)):  # without one of them the others would lead elsewhere
        problems += contradictions(records, ledger.stored_config)
    known = {f"{number:04d}" for number in ledger.numbers() if (ledger.run_dir(number) / RECORD_NAME).exists()}
    strange = sorted({path.name for path in ledger.runs_dir.glob("*") if path.name.strip().isdigit()} - known)
    problems += [f"runs/{n!a} looks like an experiment and has no record: nothing reads it" for n in strange]
    aside = ledger.runs_dir.glob(f"{ASIDE}-*")
    problems += [f"runs/{clean(path.name)}: a damaged journal was set aside" for path in aside]
    return found


def _order_problems(lines: Sequence[bytes]) -> Iterator[str]:
    number, before = 1, ""
    for place, data in enumerate(lines, 1):
        try:
            line = line_of(data)
        except ValueError as error:
            yield f"line {place} of {JOURNAL_NAME} is damaged: {error}"
            before, number = sha256(data), number + 1
            continue
        if (line.number, line.before) != (number, before):
            cause = f"line {place} of {JOURNAL_NAME}, number {line.number}, does not follow the line before it"
            yield f"{cause}: a line was changed, removed, added or moved"
        before, number = sha256(data), line.number + 1


def _name(place: int, line: Line) -> str:
    return f"line {place} ({line.event}): runs/{clean(line.file)}"


def _numbers(about: Sequence[tuple[int, Line]]) -> str:
    return listed([str(place) for place, _ in about])


def _compare_experiments(ledger: Ledger, records: Sequence[Record], places: Places, found: Findings) -> None:
    """Each experiment has one line for its train.toml and, once it is decided, one for its record."""
    say, there = found.problems.append, set(ledger.numbers())
    for file, about in places.items():
        if (match := _OF_AN_EXPERIMENT.fullmatch(file)) and int(match[1]) not in there and match[2] != JOB_NAME:
            say(f"{_name(*about[-1])} is gone: experiment {match[1]} was deleted, or moved out of runs/")
    for record in records:
        number = f"{record.number:04d}"
        begun, decided = (places.get(f"{number}/{name}", []) for name in (CONFIG_NAME, RECORD_NAME))
        for what, about in (("begun", begun), ("decided", decided)):
            if len(about) > 1:
                say(f"lines {_numbers(about)}: experiment {number} was {what} more than once")
        if record.status == STARTED and decided:
            say(f"{_name(*decided[-1])} says now that it was never decided")
        if not begun:
            if record.status != STARTED or record is not records[-1]:
                say(f"experiment {number} has no line: invented, or copied into runs/")
            continue
        if record.status != STARTED and not decided:
            found.notes.append(f"experiment {number}: its decision has no line yet, and the next start adds it")
        for place, line in (*begun[-1:], *(decided[-1:] if record.status != STARTED else ())):
            if _sha256(ledger, line.file) != line.sha256:
                say(f"{_name(place, line)} was changed since")


def _compare_other_files(
    ledger: Ledger, there: Sequence[str], measured: set[int], places: Places, found: Findings
) -> None:
    """Jobs and certificates. The job of a run that nobody collected yet may still be replaced by another one."""
    of_experiments = (f"/{CONFIG_NAME}", f"/{RECORD_NAME}")
    own = {file for file in places if not file.endswith(of_experiments)}
    for file in sorted({*there, *own}):
        say, about = found.problems.append, places.get(file, [])
        if file.endswith(JOB_NAME):
            # Collected: its run is part of a record or a certificate. Not so if the experiment is gone, which has a
            # line of its own, or if a journal that was begun anew has no line of the start.
            if match := _OF_AN_EXPERIMENT.fullmatch(file):
                is_collected = file in places and int(match[1]) in measured
            else:
                is_collected = f"{file.rpartition('/')[0]}/{RUN_NAME}" in places
            say = say if is_collected else found.notes.append
        digest = _sha256(ledger, file)
        if not about and _may_lack_a_line(file, places):
            found.notes.append(
                f"runs/{file} has no line, perhaps by a kill: it is not read, and certify makes it again"
            )
        elif not about:
            say(f"runs/{clean(file)} has no line: invented, or copied into runs/")
        elif digest is None:
            say(f"{_name(*about[-1])} was deleted")
        elif len(about) > 1 and about[-1][1].event == "measured":
            say(f"lines {_numbers(about)}: runs/{file} was measured more than once: an earlier one was deleted")
        elif digest != about[-1][1].sha256:
            say(f"{_name(*about[-1])} was changed since")


def _may_lack_a_line(file: str, places: Places) -> bool:
    """True if certify writes a file next after what the last line about its certificate speaks of: a kill may have come
    between the file and its line."""
    folder, _, name = file.rpartition("/")
    certificate = "/".join(file.split("/")[:2]) + "/"
    numbered = [line for other, about in places.items() if other.startswith(certificate) for line in about]
    if not numbered:
        return name == PLAN_NAME
    _, last = max(numbered, key=lambda each: each[0])
    if name == RUN_NAME:
        return last.file == f"{folder}/{JOB_NAME}"
    return name == COMPARISON_NAME and last.event != "begun"
