"""Compare runs/ with its journal, and repair a journal that a kill cut.

A kill may come between a file and its line. `resume_journal` adds such a line, as recovered, if the journal holds the
beginning of the same experiment.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from nightshift.campaign.campaign import Campaign, events_of
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
from nightshift.campaign.records import JOB_NAME, Action, Judgement, Record, Verdict
from nightshift.campaign.scores import run_scores
from nightshift.config.train_toml import Config
from nightshift.errors import UsageError, listed
from nightshift.files import Document, read_file
from nightshift.text import clean

_MAX_READINGS = 10  # of all records, until no line was added meanwhile
Places = Mapping[str, Sequence[tuple[int, Line]]]  # by file: its lines, with their places from 1


def resume_journal(ledger: Ledger, note: Callable[[str], None]) -> list[Record]:
    """Start a journal if there is none that lines can be added to; add the lines that a kill prevented. Call as the
    controller.

    Returns: the records.

    Raises:
        EngineError: the disk refuses.
        UsageError: a record is damaged.
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
    missing = []
    for record in records:
        config, decision = (f"{record.number:04d}/{name}" for name in (CONFIG_NAME, RECORD_NAME))
        is_begun, is_open = config in places, record.status == STARTED
        if not lines or (is_open and not is_begun):
            missing.append(config)
        if not is_open and decision not in places and (is_begun or not lines):
            missing.append(decision)
    if not lines:
        # A job.json is trusted because its line was there before its worker started. A later line proves nothing.
        missing += [file for file in _other_files(ledger) if not file.endswith(JOB_NAME)]
    for file in missing:
        if (digest := _sha256(ledger, file)) is not None:
            ledger.journal.add(EVENTS[file.rpartition("/")[2]], file, digest, recovered=True)
    return records


def _sha256(ledger: Ledger, file: str) -> str | None:
    """Return the hash of a file in runs/ as its line holds it; None if the file cannot be read."""
    try:
        data = read_file(ledger.runs_dir / file)
        return record_sha256(data) if file.endswith(f"/{RECORD_NAME}") else sha256(data)
    except (OSError, ValueError):
        return None


def _other_files(ledger: Ledger) -> list[str]:
    """Return the job files of experiments, and the files of certificates that have lines."""
    names = [name for name in EVENTS if name not in (CONFIG_NAME, RECORD_NAME)]
    patterns = [f"*/{JOB_NAME}", *(f"certify/*/{name}" for name in names), *(f"certify/*/*/{name}" for name in names)]
    paths = (path for pattern in patterns for path in ledger.runs_dir.glob(pattern))
    return sorted(path.relative_to(ledger.runs_dir).as_posix() for path in paths)


def _places(lines: Sequence[bytes]) -> Places:
    places: dict[str, list[tuple[int, Line]]] = defaultdict(list)
    for place, data in enumerate(lines, 1):
        with suppress(ValueError):
            line = line_of(data)
            places[line.file].append((place, line))
    return places


class Findings(Document, frozen=True, kw_only=True, tag="verify"):
    """What `nightshift verify` prints. Nightshift itself never causes a problem, and may cause a note. `head`: of the
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
        _, problems = ledger.readable()
        problems.append(f"{ledger.journal.path} cannot be read: {error.strerror}. So nothing can be compared with it")
        return Findings(head="", num_lines=0, problems=problems, notes=[])
    findings = Findings(head=ledger.journal.head, num_lines=len(lines), problems=problems, notes=[])
    if ledger.journal.is_cut():
        findings.notes.append(f"the last line of {JOURNAL_NAME} has no end: it was cut, perhaps by a kill")
    if head is not None and not any(sha256(line).startswith(head.lower()) for line in lines):
        problems.append(f"no line has the hash {head}: the journal was cut or rewritten since that was noted")
    problems += _order_problems(lines)
    places = _places(lines)
    recovered = [file for file, about in places.items() if any(line.recovered for _, line in about)]
    if recovered:
        names = listed([clean(file) for file in recovered])
        findings.notes.append(f"{names}: written by a later start, after a kill or because the journal was gone")
    _compare_files(ledger, records, files, places, findings)
    problems += _record_problems(records)
    if ledger.numbers() == list(range(1, len(records) + 1)):  # a missing record would change the later decisions
        problems += contradictions(records, ledger.stored_config)
    known = {f"{number:04d}" for number in ledger.numbers() if (ledger.run_dir(number) / RECORD_NAME).exists()}
    strange = sorted({path.name for path in ledger.runs_dir.glob("*") if path.name.strip().isdigit()} - known)
    problems += [f"runs/{n!a} looks like an experiment and has no record: nothing reads it" for n in strange]
    aside = ledger.runs_dir.glob(f"{ASIDE}-*")
    problems += [f"runs/{clean(path.name)}: a damaged journal was set aside" for path in aside]
    return findings


def contradictions(records: Sequence[Record], stored: Callable[[Record], Config]) -> list[str]:
    """Return a line for each experiment whose decisions are not those that the rule makes of its scores. `stored`
    returns the config that an experiment ran."""
    lines = []
    for branch, rules_hash in dict.fromkeys((record.branch, record.rules_hash) for record in records):
        campaign = Campaign()
        with suppress(UsageError):  # verify names a record or train.toml that cannot be read
            for is_start, record in events_of(records, branch, rules_hash):
                judged = record.judgement
                if not is_start and judged and record.status != Verdict.CRASH and campaign.baseline:
                    again = campaign.judge(record, stored(campaign.baseline)).judgement
                    # What the engine refused cannot be repeated without the engine.
                    if _decided(again) != _decided(judged) and not judged.refused:
                        lines.append(f"experiment {record.number:04d}: its scores do not lead to its decisions")
                campaign.step(is_start, record)
    return lines


def _decided(judgement: Judgement | None) -> list[tuple[str, Action, float]]:
    decisions = judgement.decisions if judgement else ()
    return [(d.change.name, d.action, round(d.effect or 0.0, 9)) for d in decisions]


def _record_problems(records: Sequence[Record]) -> Iterator[str]:
    by_number = {record.number: record for record in records}
    for record in records:
        try:
            _ = record.evaluation and run_scores(record)
        except UsageError as error:
            yield error.cause
        if record.baseline is not None and record.is_keep:
            source = by_number.get(record.baseline)
            same = ("result", "config_hash", "rules_hash")
            if source is None or any(getattr(source, name) != getattr(record, name) for name in same):
                yield f"experiment {record.number:04d} has not the result of {record.baseline:04d}, as it says"


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
    ledger: Ledger, records: Sequence[Record], others: Sequence[str], places: Places, findings: Findings
) -> None:
    """Compare each file with its line. An experiment has one line for its train.toml and, once it is decided, one for
    its record; each of the `others`, jobs and files of certificates, has one. A job may be submitted again until its
    run is collected."""
    by_folder = {f"{record.number:04d}": record for record in records}
    files = {f"{folder}/{CONFIG_NAME}" for folder in by_folder}
    files |= {f"{folder}/{RECORD_NAME}" for folder, record in by_folder.items() if record.status != STARTED}
    for file in sorted({*files, *others, *places}):
        folder, _, name = file.rpartition("/")
        about = places.get(file, [])
        is_problem = name != DIRECTION_NAME  # it decides nothing, and a kill may come between the file and its line
        if name == JOB_NAME:
            record = by_folder.get(folder)
            is_problem = f"{folder}/{RUN_NAME}" in places or bool(about and record and record.result)
        say = (findings.problems if is_problem else findings.notes).append
        if not about and _may_lack_a_line(file, records, places):
            cause = f"runs/{file} has no line, perhaps by a kill: the next start adds it or makes it again"
            findings.notes.append(cause)
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
    """Return True if a kill may have come between a file and its line: the train.toml of the last start, a decision, or
    the file that certify writes after the one of the certificate's last line."""
    folder, _, name = file.rpartition("/")
    if name == CONFIG_NAME:
        return records[-1].status == STARTED and folder == f"{records[-1].number:04d}"
    if name == RECORD_NAME:
        return f"{folder}/{CONFIG_NAME}" in places
    certificate = "/".join(file.split("/")[:2]) + "/"
    numbered = [line for other, about in places.items() if other.startswith(certificate) for line in about]
    if not numbered:
        return name == PLAN_NAME
    _, last = max(numbered, key=lambda entry: entry[0])
    if name == RUN_NAME:
        return last.file == f"{folder}/{JOB_NAME}"
    return name == COMPARISON_NAME and last.event != "begun"
