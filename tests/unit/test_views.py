"""--json: every answer is one object of the shape that docs/schemas says, of a recorded campaign and of a made-up one
with crashes, take-backs and runs side by side."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from nightshift.campaign.campaign import expected
from nightshift.campaign.index import fold, last_campaign
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Failure, Judgement, Verdict
from nightshift.campaign.standing import Counts
from nightshift.cli import run as command
from nightshift.cli.main import commands
from nightshift.cli.views import compared
from nightshift.report.views import encoded
from tests.campaigns import COMPARISON, a_record
from tests.checkouts import commit_all
from tests.recorded_nights import stored_night
from tests.stand_in_campaign import BRANCH, build
from tests.terminals import Terminal

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import schemas  # noqa: E402


def furnished(root: Path, branch: str) -> Path:
    """A checkout as commands look for one, whose runs/ is there already."""
    for name in ("run.py", "train.toml", "rules.toml", "pyproject.toml"):
        shutil.copy2(ROOT / name, root / name)
    (root / "environments").symlink_to(ROOT / "environments")
    (root / "models").symlink_to(ROOT / "models")
    (root / ".gitignore").write_text("runs/\nresults.tsv\nenvironments\nmodels\n")
    commit_all(root, branch)
    return root


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A night of the recorded runs."""
    root = tmp_path_factory.mktemp("recorded")
    stored_night(root)
    return furnished(root, "autoresearch/tpe-0")


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Crashes of both kinds, take-backs, an interruption, hostile words, runs of two slots."""
    root = tmp_path_factory.mktemp("made_up")
    ledger = build(root, 40, seed=10, num_examples=200, with_files=False)
    for record in ledger.records():
        result = record.result and replace(record.result, place=f"slot {record.number % 2}")
        ledger.write(replace(record, result=result, description=f"{record.description} \u202e\ud83d \x1b[31m"))
    cut = ledger.reserve(
        a_record(branch=BRANCH, rules_hash=record.rules_hash, parent=1, description="cut off"), {"train.toml": b""}
    )
    judgement = Judgement(Verdict.CRASH, "interrupted: Ctrl-C")
    ledger.write(replace(cut, status="crash", failure=Failure.INTERRUPTED, judgement=judgement))
    return furnished(root, BRANCH)


@pytest.fixture(params=["recorded", "made_up"])
def root(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    found: Path = request.getfixturevalue(request.param)
    monkeypatch.setattr(command, "process_root", lambda: found)
    return found


def invoked(*words: str) -> Result:
    return CliRunner().invoke(commands, [*words, "--json"])


def answer(*words: str, code: int = 0) -> dict[str, Any]:
    """What a command says on stdout: one object, of the shape that its schema says, and nothing else."""
    done = invoked(*words)
    assert done.exit_code == code, (words, done.output)
    return checked(done.stdout)


def checked(text: str) -> dict[str, Any]:
    assert text.isascii()
    [line] = text.splitlines()
    found: dict[str, Any] = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    schema = json.loads((ROOT / "docs" / "schemas" / f"{found['kind']}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(found)
    assert found["version"] == 1
    return found


def test_the_schemas_in_docs_are_those_of_the_types() -> None:
    """uv run tools/schemas.py docs/schemas writes them."""
    folder = ROOT / "docs" / "schemas"
    made = {f"{kind}.json": schemas.text_of(schema) for kind, schema in schemas.schemas().items()}
    assert {path.name: path.read_text() for path in folder.iterdir()} == made
    for text in made.values():
        jsonschema.Draft202012Validator.check_schema(json.loads(text))


def test_status_counts_as_everything_else_does(root: Path) -> None:
    ledger = Ledger(root)
    found = answer("status")
    campaign = fold(ledger, records := ledger.records(), *last_campaign(records))
    counts = Counts.of(records, {record.number for record in campaign.taken_back})
    assert found["counted"] == {name: getattr(counts, name) for name in counts.__slots__}
    assert counts.taken_back > 0
    assert campaign.incumbent is not None
    assert campaign.standing is not None
    assert found["incumbent"]["number"] == campaign.incumbent.number
    assert found["incumbent_score"] == pytest.approx(campaign.standing.incumbent)
    assert (found["is_running"], found["running"], found["night"], found["damaged"]) == (False, [], None, [])


def test_a_name_that_is_added_breaks_nobody_who_validates(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a version, as docs/using.md promises."""
    monkeypatch.setattr(command, "process_root", lambda: recorded)
    found = answer("status")
    checked(json.dumps(found | {"new": 1, "incumbent": found["incumbent"] | {"new": 1}}))


def test_an_experiment_in_flight_is_told(made_up: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(made_up, tmp_path / "copy", symlinks=True)
    ledger = Ledger(tmp_path / "copy")
    monkeypatch.setattr(command, "process_root", lambda: tmp_path / "copy")
    number = ledger.reserve(a_record(branch=BRANCH), {"train.toml": b""}).number
    with ledger.controller():
        found = answer("status")
    assert [(each["number"], each["progress"]) for each in found["running"]] == [(number, None)]
    assert found["running"][0]["seconds"] > 0


def test_history_has_every_experiment_with_its_two_numbers(root: Path) -> None:
    ledger = Ledger(root)
    campaign = fold(ledger, records := ledger.records(), *last_campaign(records))
    found = answer("history")
    by_number = {each["number"]: each for each in found["experiments"]}
    assert [*by_number] == [record.number for record in campaign.decided]
    moved = 0
    for record in campaign.decided:
        told, now = by_number[record.number], expected(campaign, record)
        assert told["eval_score"] == record.score
        assert (told["expected"], told["expected_stderr"]) == (tuple(now) if now else (None, None))
        assert told["expected_then"] == (record.judgement.delta if record.judgement else None)
        moved += told["expected"] != told["expected_then"]
    assert moved
    outcomes = Counter(told["outcome"] for told in by_number.values())
    assert outcomes["baseline"] == 1
    assert outcomes["taken_back"] == len(campaign.taken_back) > 0
    assert outcomes["kept"] + outcomes["taken_back"] == len(campaign.kept) - 1
    for key in found["keys"]:
        assert all(trial["outcome"] == by_number[trial["number"]]["outcome"] for trial in key["trials"])


def test_show_has_the_record_and_what_was_not_measured_is_null(root: Path) -> None:
    outcomes = set()
    for number in Ledger(root).numbers():
        found = answer("show", str(number))
        record = json.loads((root / "runs" / f"{number:04d}" / "record.json").read_bytes())
        told = found["experiment"]
        outcomes.add(told["outcome"])
        assert (told["number"], found["record"]["status"]) == (number, record["status"])
        assert (told["eval_score"] is None) == (record["status"] == "crash")
        assert found["files"] == f"runs/{number:04d}"
        if told["outcome"] == "baseline":
            assert (told["expected"], told["expected_then"], told["p_better"], told["parent"]) == (None,) * 4
    assert outcomes >= {"baseline", "kept", "taken_back", "discarded"}
    if (root / "runs" / "0041").is_dir():
        assert outcomes >= {"crashed", "interrupted"}


def test_differences(root: Path) -> None:
    found = answer("diff", "baseline", "incumbent")
    assert found["changes"]
    assert not found["is_same_file"]
    assert answer("diff", "1", "1")["changes"] == []
    chain = answer("diff", "--chain")["experiments"]
    assert chain[0]["outcome"] == "baseline"
    assert chain[-1]["changes"]


def test_verify_and_doctor(root: Path) -> None:
    code = invoked("verify").exit_code
    found = answer("verify", code=code)
    assert bool(found["problems"]) == (code == 1)
    found = checked(invoked("doctor", "--engine", "trl").stdout)
    assert {each["engine"] for each in found["checks"]} == {"all", "trl", "prime-rl"}
    assert found["is_ready"] == all(e["problem"] is None for e in found["checks"] if e["engine"] in ("all", "trl"))


def test_comparisons_have_their_shapes() -> None:
    found = checked(encoded(compared.Certified(comparisons=(COMPARISON,))))
    assert (found["kind"], found["comparisons"][0]["verdict"]) == ("certify", "better")
    assert checked(encoded(compared.Planned(command="certify", lines=("time: 1 min",))))["kind"] == "plan"


def test_what_is_no_number_is_null_and_a_lone_surrogate_does_no_harm() -> None:
    no_number = replace(COMPARISON, level=float("nan"), model="\udc80")
    plain = json.loads(encoded(compared.Certified(comparisons=(no_number,))))
    assert plain["comparisons"][0]["level"] is None


def test_a_narrow_terminal_gets_the_same_line(recorded: Path) -> None:
    """Many agents' tools give a command a terminal, not a pipe."""
    program = "import sys; from nightshift.cli.main import commands; commands(['show', '2', '--json'])"
    terminal = Terminal([sys.executable, "-c", program], recorded, PYTHONPATH=str(ROOT))
    assert terminal.finish() == 0
    [line] = [line for line in terminal.lines if line.startswith("{")]
    assert checked(line)["experiment"]["number"] == 2


def test_an_error_is_one_line_on_stderr_and_nothing_on_stdout(root: Path) -> None:
    for words, code in ((["show", "99"], 2), (["diff", "nothing"], 2), (["doctor", "--environment", "gsm8k"], 2)):
        done = invoked(*words)
        assert (done.exit_code, done.stdout) == (code, ""), words
        [line] = [line for line in done.stderr.splitlines() if not line.startswith("reading the records")]
        assert not line.startswith("{")
