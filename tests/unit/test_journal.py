"""`nightshift verify` names what somebody changed under runs/, and no kill makes it cry wolf."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from nightshift.campaign import journal
from nightshift.campaign.campaign import fold
from nightshift.campaign.journal import Access, Journal, Line
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Judgement, Record
from nightshift.campaign.results import last_campaign
from nightshift.campaign.verify import resume_journal, verify
from nightshift.cli import run
from nightshift.cli.main import commands
from nightshift.errors import EngineError, UsageError
from tests.campaigns import a_record, a_result, campaign, replace

ACCESS = Access(
    number=1, branch="autoresearch/test", rules_hash="rules", configs={"baseline": "b", "incumbent": "i"}, token="k"
)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Four experiments, one certificate with two jobs."""
    ledger = Ledger(tmp_path)
    campaign(ledger, ["3e-6", "5e-6", "7e-6"])
    folder = ledger.runs_dir / "certify" / "0001"
    for side in ("baseline", "incumbent"):
        (folder / f"{side}-7").mkdir(parents=True)
        for name in ("job.json", "run.json"):
            path = folder / f"{side}-7" / name
            path.write_text(f'{{"side":"{side}"}}\n')
            ledger.enter(path, replace(ACCESS, token=side) if name == "job.json" else None)
    path = folder / "comparison.json"
    path.write_text('{"difference":0.01}\n')
    ledger.enter(path)
    assert verify(ledger).problems == verify(ledger).notes == []
    return ledger


def again(ledger: Ledger) -> Ledger:
    """As the next process sees it."""
    return Ledger(ledger.tsv_path.parent)


def problems(ledger: Ledger) -> list[str]:
    return verify(again(ledger)).problems


def edit(ledger: Ledger, experiment: int, /, **changes: object) -> None:
    path = ledger.run_dir(experiment) / "record.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def say(ledger: Ledger, experiment: int, **texts: str) -> None:
    record = json.loads((ledger.run_dir(experiment) / "record.json").read_text())
    edit(ledger, experiment, proposal=record["proposal"] | texts)


def lines(ledger: Ledger) -> list[bytes]:
    return ledger.journal.path.read_bytes().splitlines(keepends=True)


def rewrite(ledger: Ledger, new: list[Line]) -> None:
    """A journal of these lines without a fault, as whoever has read journal.py writes it."""
    before, data = "", b""
    for number, each in enumerate(new, 1):
        line = msgspec.json.encode(replace(each, number=number, before=before))
        before, data = journal.sha256(line), data + line + b"\n"
    ledger.journal.path.write_bytes(data)


def reorder(ledger: Ledger, order: Callable[[list[bytes]], list[bytes]]) -> None:
    ledger.journal.path.write_bytes(b"".join(order(lines(ledger))))


def a_better_score(ledger: Ledger) -> None:
    path = ledger.run_dir(3) / "record.json"
    path.write_text(path.read_text().replace('"eval_score":0.55', '"eval_score":0.95'))


def a_record_with_its_times(ledger: Ledger) -> None:
    path = ledger.run_dir(3) / "record.json"
    before = path.stat()
    a_better_score(ledger)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def doubled(ledger: Ledger) -> None:
    shutil.copytree(ledger.run_dir(2), ledger.run_dir(5))
    edit(ledger, 5, number=5, decided=5)


def in_place_of_another(ledger: Ledger) -> None:
    shutil.rmtree(ledger.run_dir(3))
    shutil.copytree(ledger.run_dir(2), ledger.run_dir(3))
    edit(ledger, 3, number=3, decided=3)


def swapped(ledger: Ledger) -> None:
    for number, name in ((3, "aside"), (4, "0003")):
        ledger.run_dir(number).rename(ledger.runs_dir / name)
    (ledger.runs_dir / "aside").rename(ledger.run_dir(4))
    edit(ledger, 3, number=3)
    edit(ledger, 4, number=4)


def deleted_and_begun_again(ledger: Ledger) -> None:
    shutil.rmtree(ledger.run_dir(4))
    ledger.reserve(a_record(), {"train.toml": b"seq_len = 2048\n"})


def decided_again(ledger: Ledger) -> None:
    """Said to be open, so that the next start closes it once more, as interrupted."""
    edit(ledger, 4, status="started", judgement=None, decided=None)
    record = replace(again(ledger).record(4), status="crash", judgement=Judgement(why="interrupted"))
    again(ledger).write(record)


def invented_then_a_start(ledger: Ledger) -> None:
    doubled(ledger)
    resume_journal(again(ledger), lambda text: None)


def over_a_link(ledger: Ledger) -> None:
    ledger.run_dir(3).rename(ledger.runs_dir.parent / "elsewhere")
    ledger.run_dir(3).symlink_to(ledger.runs_dir.parent / "elsewhere")


UNICODE = "\u0660\u0660\u0660\u0661"  # int() takes these for 1

RECORD = "(decided): runs/0003/record.json was changed since"
ATTACKS: dict[str, tuple[Callable[[Ledger], Any], str]] = {
    "a better score": (a_better_score, RECORD),
    "a better score, times restored": (a_record_with_its_times, RECORD),
    "another verdict": (lambda x: edit(x, 3, status="keep"), RECORD),
    "another branch": (lambda x: edit(x, 3, branch="autoresearch/other"), RECORD),
    "undecided": (lambda x: edit(x, 3, decided=None), RECORD),
    "open again": (lambda x: edit(x, 3, status="started"), RECORD),
    "another prediction": (lambda x: say(x, 3, prediction="+9 pp"), RECORD),
    "decided again": (decided_again, "lines 8, 14: runs/0004/record.json was written more than once"),
    "deleted": (lambda x: shutil.rmtree(x.run_dir(2)), "runs/0002/record.json was changed since, or deleted"),
    "the last deleted": (lambda x: shutil.rmtree(x.run_dir(4)), "runs/0004/record.json was changed since, or deleted"),
    "only its record deleted": (lambda x: (x.run_dir(3) / "record.json").unlink(), "'0003' looks like"),
    "deleted and begun again": (deleted_and_begun_again, "lines 7, 14: runs/0004/train.toml was written more"),
    "doubled": (doubled, "runs/0005/record.json has no line"),
    "in place of another": (in_place_of_another, RECORD),
    "swapped": (swapped, "(decided): runs/0004/record.json was changed since"),
    "renamed": (lambda x: x.run_dir(3).rename(x.runs_dir / "0007"), RECORD),
    "invented, then a start": (invented_then_a_start, "runs/0005/train.toml has no line"),
    "a link in its place": (over_a_link, "'0003' looks like"),
    "one digit more": (lambda x: shutil.copytree(x.run_dir(1), x.runs_dir / "00001"), "'00001' looks like"),
    "Unicode digits": (lambda x: shutil.copytree(x.run_dir(1), x.runs_dir / UNICODE), "looks like"),
    "a file in its place": (lambda x: (x.runs_dir / "0009").write_text("x"), "'0009' looks like"),
    "another train.toml": (
        lambda x: (x.run_dir(2) / "train.toml").write_text("x"), "line 3 (begun): runs/0002/train.toml was changed"
    ),
    "no train.toml": (lambda x: (x.run_dir(2) / "train.toml").unlink(), "runs/0002/train.toml was changed"),
    "another job of a certificate": (
        lambda x: (x.runs_dir / "certify/0001/baseline-7/job.json").write_text("{}"),
        "line 9 (access): runs/certify/0001/baseline-7/job.json was changed since",
    ),
    "another run of a certificate": (
        lambda x: (x.runs_dir / "certify/0001/baseline-7/run.json").write_text("{}"), "(measured): runs/certify/0001/b"
    ),
    "another certificate": (
        lambda x: (x.runs_dir / "certify/0001/comparison.json").write_text('{"difference":0.1}\n'),
        "line 13 (certified): runs/certify/0001/comparison.json was changed since",
    ),
    "no certificate": (
        lambda x: shutil.rmtree(x.runs_dir / "certify" / "0001"), "certify/0001/comparison.json was changed since"
    ),
    "a certificate more": (
        lambda x: shutil.copytree(x.runs_dir / "certify" / "0001", x.runs_dir / "certify" / "0009"),
        "certify/0009/comparison.json has no line",
    ),
    "a line changed": (lambda x: reorder(x, lambda o: [*o[:2], o[2].replace(b"a", b"b"), *o[3:]]), "line 3"),
    "a line deleted": (lambda x: reorder(x, lambda o: [*o[:3], *o[4:]]), "line 4 of journal.jsonl, number 5, does"),
    "the first line deleted": (lambda x: reorder(x, lambda o: o[1:]), "line 1 of journal.jsonl, number 2, does not"),
    "a line doubled": (lambda x: reorder(x, lambda o: [*o[:3], *o[2:]]), "line 4 of journal.jsonl, number 3, does not"),
    "lines swapped": (lambda x: reorder(x, lambda o: [o[0], o[2], o[1], *o[3:]]), "journal.jsonl, number 3, does not"),
    "a line of text": (lambda x: reorder(x, lambda o: [*o[:2], b"x\n", *o[2:]]), "line 3 of journal.jsonl is damaged"),
    "a line of brackets": (
        lambda x: reorder(x, lambda o: [*o[:2], b"[" * 200_000 + b"\n", *o[2:]]), "line 3 of journal.jsonl is damaged"
    ),
    "cut by many lines": (lambda x: reorder(x, lambda o: o[:4]), "has no line"),
    "cut in an earlier line": (lambda x: reorder(x, lambda o: [*o[:-3], o[-3][:9]]), "run.json has no line"),
    "no journal": (lambda x: x.journal.path.unlink(), "has no line"),
    "a pipe for a journal": (
        lambda x: (x.journal.path.unlink(), os.mkfifo(x.journal.path)), "journal.jsonl cannot be read"
    ),
    "a link for a journal": (
        lambda x: (x.journal.path.rename(x.runs_dir / "c"), x.journal.path.symlink_to("c")), "it is a symbolic link"
    ),
    "a folder for a journal": (
        lambda x: (x.journal.path.unlink(), x.journal.path.mkdir()), "journal.jsonl cannot be read"
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", ATTACKS)
def test_what_was_changed_is_named(ledger: Ledger, how: str) -> None:
    attack, words = ATTACKS[how]
    attack(ledger)
    assert words in "\n".join(problems(ledger))


@pytest.mark.parametrize("how", ["honest", "a better score", "a line changed", "a pipe for a journal"])
def test_the_command_tells_and_its_exit_code_says_so(ledger: Ledger, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "process_root", lambda: ledger.tsv_path.parent)
    if how != "honest":
        ATTACKS[how][0](ledger)
    done = CliRunner().invoke(commands, ["verify"])
    assert done.exit_code == (how != "honest"), done.output
    assert ("wrong:" in done.output) == (how != "honest")
    assert f"journal:  {ledger.journal.head}" in done.output
    for head in ("", "abc", "x" * 12, "A" * 12):
        assert CliRunner().invoke(commands, ["verify", "--head", head]).exit_code == 2


@pytest.mark.parametrize("how", ["honest", "rewritten", "cut", "deleted"])
def test_a_journal_alone_proves_that_runs_fits_it_and_a_head_that_was_noted_proves_more(ledger, how, monkeypatch):
    noted = [journal.sha256(line[:-1])[: journal.HEAD_DIGITS] for line in lines(ledger)]
    held = [journal.line_of(line) for line in lines(ledger)]
    if how == "rewritten":
        a_better_score(ledger)
        new = journal.record_sha256((ledger.run_dir(3) / "record.json").read_bytes())
        rewrite(ledger, [replace(each, sha256=new) if each.file == "0003/record.json" else each for each in held])
    elif how == "cut":
        shutil.rmtree(ledger.run_dir(4))
        rewrite(ledger, [each for each in held if not each.file.startswith("0004")])
    elif how == "deleted":
        a_better_score(ledger)
        ledger.journal.path.unlink()
        for path in ledger.runs_dir.glob("certify/*/*/job.json"):
            path.unlink()
        resume_journal(again(ledger), lambda text: None)
    assert problems(ledger) == []
    told = verify(again(ledger), noted[-1]).problems
    assert bool(told) == (how != "honest")
    assert all("no line has the hash" in line for line in told)
    assert (verify(again(ledger), noted[0]).problems != []) == (how == "deleted")  # before the change it is the same
    monkeypatch.setattr(run, "process_root", lambda: ledger.tsv_path.parent)
    done = CliRunner().invoke(commands, ["verify", "--head", noted[-1]])
    assert done.exit_code == (how != "honest")


def test_records_that_are_older_than_the_journal_enter_as_recovered(ledger: Ledger) -> None:
    ledger.journal.path.unlink()
    for _ in range(2):
        resume_journal(again(ledger), lambda text: None)
    held = [journal.line_of(line) for line in lines(ledger)]
    assert {(each.event, each.recovered) for each in held} == {
        (event, True) for event in ("begun", "decided", "measured", "certified")
    }
    found = verify(again(ledger))
    assert found.problems == [
        f"runs/certify/0001/{side}-7/job.json has no line: invented, or copied into runs/"
        for side in ("baseline", "incumbent")
    ], "what a worker was given is believed only if its line was written before it started"
    assert len(found.notes) == 1
    assert "written by a later start, after a kill or because the journal was gone" in found.notes[0]
    assert "0001/train.toml" in found.notes[0]
    a_better_score(ledger)
    assert RECORD in problems(ledger)[0]


def test_an_outcome_and_a_lesson_are_written_after_the_decision_and_change_no_hash(ledger: Ledger) -> None:
    record = ledger.record(2)
    written = {"git_action": "by hand", "commits": {"keep 0002": "f" * 40}, "lesson": "x"}
    ledger.write(replace(record, **written, reported_outcome="better"))
    assert len(lines(ledger)) == 13
    assert problems(ledger) == []


def test_a_line_without_an_end_is_noted_and_what_a_kill_may_have_done_is_no_problem(ledger: Ledger) -> None:
    reorder(ledger, lambda old: [*old[:-1], old[-1][:9]])
    assert verify(again(ledger)).problems == []
    assert verify(again(ledger)).notes == [
        "the last line of journal.jsonl has no end: it was cut, perhaps by a kill",
        "runs/certify/0001/comparison.json has no line, perhaps by a kill: the next start adds it or makes it again",
    ]


def test_what_a_controller_writes_while_verify_reads_is_no_problem(ledger, monkeypatch):
    record, controller, readable = (
        ledger.reserve(a_record(), {"train.toml": b"x = 1\n"}),
        again(ledger),
        Ledger.readable,
    )

    def late(self: Ledger) -> tuple[list[Record], list[str]]:
        found = readable(self)
        controller.write(
            replace(record, status="discard", judgement=Judgement(why="why"), result=a_result(), decided=5)
        )
        path = ledger.runs_dir / "certify" / "0001" / "baseline-8" / "run.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
        controller.enter(path)
        return found

    monkeypatch.setattr(Ledger, "readable", late)
    found = verify(again(ledger))
    assert found.problems == found.notes == []
    assert found.num_lines == 16


def test_a_name_in_the_journal_stays_in_its_line(ledger: Ledger) -> None:
    held = [journal.line_of(line) for line in lines(ledger)]
    rewrite(ledger, [*held, replace(held[0], file="0009/x\x1b[2J\nnote: all is well", recovered=True)])
    (ledger.runs_dir / "journal.damaged-1\nall is well").touch()
    found = verify(again(ledger))
    assert len(found.problems) == 2
    for told in (*found.problems, *found.notes):
        assert told.isprintable(), told


class Killed(BaseException):
    """Instead of SIGKILL."""


def a_life(ledger: Ledger) -> Record:
    """What an experiment writes, from its number to the lesson that its successor draws."""
    record = ledger.reserve(a_record(), {"train.toml": b"x = 1\n", "config.json": b"{}"})
    record = replace(record, status="keep", judgement=Judgement(why="why"), result=a_result(), decided=5)
    ledger.write(record)
    ledger.close(replace(record, git_action="committed", commits={"keep 0002": "a" * 40}))
    ledger.write(replace(record, git_action="committed", commits={"keep 0002": "a" * 40}, lesson="a lesson"))
    return record


@pytest.mark.parametrize("torn", [0, 1, 60])
@pytest.mark.parametrize("line", [1, 2])
def test_a_kill_between_a_record_and_its_line_heals_without_a_false_alarm(ledger, line, torn, monkeypatch):
    num_before, add, count = len(lines(ledger)), Journal.add, 0

    def killed(self: Journal, *args: Any, **named: Any) -> bool:
        nonlocal count
        count += 1
        if count < line:
            return add(self, *args, **named)
        before = self.path.read_bytes()
        add(self, *args, **named)
        self.path.write_bytes(self.path.read_bytes()[: len(before) + torn])
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", killed)
        with pytest.raises(Killed):
            a_life(ledger)
    assert problems(ledger) == []  # before any start
    heir = again(ledger)
    resume_journal(heir, pytest.fail)
    assert problems(ledger) == []
    assert len(lines(ledger)) == num_before + line
    assert any("0005" in note for note in verify(again(ledger)).notes)
    resume_journal(again(ledger), pytest.fail)
    assert len(lines(ledger)) == num_before + line


def test_runs_side_by_side_end_in_any_order_and_a_kill_heals_all_the_same(ledger, monkeypatch):
    first, second = (ledger.reserve(a_record(), {"train.toml": b"x = %d\n" % n}) for n in (1, 2))
    ends = {"status": "discard", "judgement": Judgement(why="why"), "result": a_result()}
    ledger.close(replace(second, **ends, decided=5))

    def killed(self: Journal, *args: Any, **named: Any) -> bool:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", killed)
        with pytest.raises(Killed):
            ledger.write(replace(first, **ends, decided=6))
    resume_journal(again(ledger), pytest.fail)
    assert problems(ledger) == []
    ledger.write(replace(second, **ends, decided=5, lesson="a lesson"))
    data = (ledger.run_dir(first.number) / "record.json").read_bytes()
    (ledger.run_dir(first.number) / "record.json").write_bytes(data.replace(b'"decided":6', b'"decided":7'))
    resume_journal(again(ledger), pytest.fail)
    assert problems(ledger) != [], "an old record that is edited to be the last decided is not entered"


@pytest.mark.parametrize(
    "how", ["a pipe for a journal", "a link for a journal", "a folder for a journal", "text", "huge"]
)
def test_a_journal_that_lines_cannot_be_added_to_is_set_aside_and_named_and_blocks_nothing(ledger, how):
    if how in ATTACKS:
        ATTACKS[how][0](ledger)
    elif how == "text":
        reorder(ledger, lambda old: [*old, b"[" * 200_000 + b"\n"])
    else:
        os.truncate(ledger.journal.path, 1 << 40)
    with pytest.raises(EngineError, match=r"journal\.jsonl"):
        a_life(again(ledger))
    notes: list[str] = []
    resume_journal(again(ledger), notes.append)
    assert "journal.damaged-1" in notes[0]
    assert "\n" not in notes[0]
    a_life(again(ledger))
    jobs = [f"runs/certify/0001/{side}-7/job.json has no line" for side in ("baseline", "incumbent")]
    found = problems(ledger)
    assert found.pop() == "runs/journal.damaged-1: a damaged journal was set aside"
    assert [line.partition(":")[0] for line in found] == jobs


DAMAGE = {
    "null": b"null",
    "text": b'"x"',
    "brackets": b"[" * 200_000,
    "brackets in a field": b'{"version":1,"rules_name":' + b"[" * 200_000 + b"}",
    "no bytes": b"",
    "cut": b'{"version":3,"number":3,"sta',
    "no UTF-8": b'{"description":"\xff\xfe"}',
}
CHANGES = {
    "NaN": ('"eval_score":0.55', '"eval_score":NaN'),
    "infinite": ('"eval_score":0.55', '"eval_score":1e999'),
    "a score of text": ('"scores":[1.0', '"scores":["1"'),
    "a score above 1": ('"scores":[1.0', '"scores":[1.5'),
    "a score below 0": ('"scores":[1.0', '"scores":[-1e-9'),
    "a mean above 1": ('"eval_score":0.55', '"eval_score":55'),
    "a place without end": ('"decided":3', '"decided":9223372036854775807'),
    "another's number": ('"number":3', '"number":2'),
    "no kinds": ('"kinds":[[', '"kinds":[],"x":[['),
    "no noises": ('"noises":[[', '"noises":[],"x":[['),
    "a share below 0": ('"kinds":[[0.03,0.07,0.5]', '"kinds":[[0.03,0.07,-0.5]'),
    "no share above 0": ('"accidents":[[0.0,0.0,0.97],[-0.12,0.1,0.03]]', '"accidents":[[0.0,0.0,0.0]]'),
    "a noise of 0": ('"noises":[[0.5,0.08]', '"noises":[[0.0,0.08]'),
    "no spread": ('"seed_sd":0.013', '"seed_sd":0'),
    "a certain keep": ('"keep_at":0.6', '"keep_at":1.0'),
    "endless": ('"total_seconds":75.0', '"total_seconds":1e300'),
    "an unknown status": ('"status":"discard"', '"status":"best"'),
    "another version": ('"version":3', '"version":99'),
    "an absurd error": ('"eval_stderr":0.01', '"eval_stderr":-1e308'),
    "absurdly many steps": ('"num_steps":40', f'"num_steps":{10**400}'),
    "an absurd reward": ('"reward_mean":0.4', '"reward_mean":1e308'),
    "an absurd step": ('"step":40', f'"step":{10**400}'),
    "an absurd part": (
        '"parts":[]', '"parts":[{"environment":"a","num_examples":1,"weight":1.0,"score":1.0,"stderr":1e308}]'
    ),
    "no time zone": ("22:00:00+00:00", "22:00:00"),
    "no time": ("2026-11-21T22:00:00+00:00", "yesterday"),
}  # fmt: skip


@pytest.mark.parametrize("how", [*DAMAGE, *CHANGES, "a pipe", "a link", "a folder", "huge"])
def test_a_damaged_record_is_one_line_and_all_that_looks_goes_on_unless_it_needs_its_scores(ledger, how, monkeypatch):
    path = ledger.run_dir(3) / "record.json"
    if how in CHANGES:
        assert CHANGES[how][0] in path.read_text()
        path.write_text(path.read_text().replace(*CHANGES[how], 1))
    else:
        path.unlink()
        {
            "a pipe": lambda: os.mkfifo(path),
            "a link": lambda: path.symlink_to("/etc/passwd"),
            "a folder": path.mkdir,
            "huge": lambda: (path.touch(), os.truncate(path, 1 << 40)),
        }.get(how, lambda: path.write_bytes(DAMAGE[how]))()

    def believe() -> None:  # scores are looked at where they are used
        records = again(ledger).records()
        fold(ledger, records, *last_campaign(records))

    with pytest.raises(UsageError, match=r"0003/record\.json is damaged: .*Move .*0003 out of runs/"):
        believe()
    assert "0003/record.json is damaged" in "\n".join(problems(ledger))
    monkeypatch.setattr(run, "process_root", lambda: ledger.tsv_path.parent)
    monkeypatch.setenv("COLUMNS", "1000")
    is_read = "scores" not in CHANGES.get(how, ("",))[0]  # and so found to be damaged
    for words in (["status"], ["history"], ["show", "2"], ["verify"]):
        done = CliRunner().invoke(commands, words)
        is_folded = words in (["history"], ["show", "2"]) and not is_read
        assert done.exit_code == (2 if is_folded else words == ["verify"]), (words, done.output)
        is_named = words[0] in ("history", "verify") or (words == ["status"] and is_read) or is_folded
        assert ("0003/record.json is damaged" in done.output) == is_named


@pytest.mark.parametrize("name", ["999999999", "9999999999", "9" * 40, "00000", "1\u00b2", "-001", " 0001"])
def test_no_name_of_a_folder_makes_a_record_or_takes_the_last_number(ledger: Ledger, name: str) -> None:
    shutil.copytree(ledger.run_dir(2), ledger.runs_dir / name)
    if name == "999999999":
        assert problems(ledger) != []
        with pytest.raises(UsageError, match=r"leaves no number for another experiment\. Move it out of runs/"):
            ledger.next_number()
        return
    assert ledger.numbers() == [1, 2, 3, 4]
    assert ledger.next_number() == 5
    assert [p for p in problems(ledger) if "looks like" not in p] == []
    assert problems(ledger) != [] or name == "-001"
