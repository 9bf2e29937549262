"""What differs between runs/ and its journal, in plain lines; and what a start does about a journal that a kill cut.

A kill may come between the writing of a file and its line. `resume_journal` adds that line, as recovered, if the
journal holds the beginning of the same experiment.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from nightshift.campaign.campaign import contradictions
from nightshift.campaign.git import CONFIG_NAME
from nightshift.campaign.journal import ASIDE, JOURNAL_NAME, Line, line_of, record_sha256, sha256
from nightshift.campaign.ledger import (
    COMPARISON_NAME,
    DIRECTION_NAME,
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

_MAX_READINGS = 10  # of all records, until no line was added meanwhile
Places = Mapping[str, Sequence[tuple[int, Line]]]  # by file: the lines about it, with their places from 1


def resume_journal(ledger: Ledger, note: Callable[[str], None]) -> list[Record]:
    """Begin a journal if there is none that lines can be added to; add the lines that a kill prevented.

    Returns the records. Call as the controller. EngineError; UsageError for a damaged record.
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
    _compare_files(ledger, records, files, places, found)
    by_number = {record.number: record for record in records}
    for record in records:
        try:
            _ = record.evaluation and run_scores(record)
        except UsageError as error:
            problems.append(error.cause)
        if record.baseline is not None and record.is_keep:
            source = by_number.get(record.baseline)
            same = ("result", "config_hash", "rules_hash")
            if source is None or any(getattr(source, name) != getattr(record, name) for name in same):
                cause = f"experiment {record.number:04d} has not the result of {record.baseline:04d}, as it says"
                problems.append(cause)
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


def _compare_files(
    ledger: Ledger, records: Sequence[Record], others: Sequence[str], places: Places, found: Findings
) -> None:
    """Each experiment has one line for its train.toml and, once it is decided, one for its record; and so has each of
    the `others`, jobs and files of certificates. A job may be submitted again until its run is collected."""
    by_folder = {f"{record.number:04d}": record for record in records}
    files = {f"{folder}/{CONFIG_NAME}" for folder in by_folder}
    files |= {f"{folder}/{RECORD_NAME}" for folder, record in by_folder.items() if record.status != STARTED}
    for file in sorted({*files, *others, *places}):
        folder, _, name = file.rpartition("/")
        say, about = found.problems.append, places.get(file, [])
        if name == JOB_NAME:
            record = by_folder.get(folder)
            is_collected = f"{folder}/{RUN_NAME}" in places or bool(about and record and record.result)
            say = say if is_collected else found.notes.append
        elif name == DIRECTION_NAME:  # it decides nothing, and a kill may come between the file and its line
            say = found.notes.append
        if not about and _may_lack_a_line(file, records, places):
            found.notes.append(f"runs/{file} has no line, perhaps by a kill: the next start adds it or makes it again")
        elif not about:
            say(f"runs/{clean(file)} has no line: invented, or copied into runs/")
        else:
            place, line = about[-1]
            if len(about) > 1 and name not in (JOB_NAME, DIRECTION_NAME):
                numbers = listed([str(number) for number, _ in about])
                say(f"lines {numbers}: runs/{clean(file)} was written more than once: an earlier one was deleted")
            if _sha256(ledger, file) != line.sha256:
                say(f"line {place} ({line.event}): runs/{clean(file)} was changed since, or deleted")


def _may_lack_a_line(file: str, records: Sequence[Record], places: Places) -> bool:
    """True if a kill may have come between a file and its line: the train.toml of the last start, a decision; and what
    certify writes next after the file that the last line about its certificate speaks of."""
    folder, _, name = file.rpartition("/")
    if name == CONFIG_NAME:
        return records[-1].status == STARTED and folder == f"{records[-1].number:04d}"
    if name == RECORD_NAME:
        return f"{folder}/{CONFIG_NAME}" in places
    certificate = "/".join(file.split("/")[:2]) + "/"
    numbered = [line for other, about in places.items() if other.startswith(certificate) for line in about]
    if not numbered:
        return name == PLAN_NAME
    _, last = max(numbered, key=lambda each: each[0])
    if name == RUN_NAME:
        return last.file == f"{folder}/{JOB_NAME}"
    return name == COMPARISON_NAME and last.event != "begun"
