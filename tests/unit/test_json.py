"""--json: one object on stdout with a kind and a version, for a made-up campaign with riders, crashes, reverts and runs
side by side. docs/schemas has the shapes of an experiment and of status."""

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import incumbent_config
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Judgement
from nightshift.campaign.results import Counts, last_campaign
from nightshift.cli import run as command
from nightshift.cli.main import commands
from nightshift.cli.output import print_result
from nightshift.errors import Failure
from nightshift.experiment.certify import Certified
from tests.campaigns import COMPARISON, a_record, replace
from tests.checkouts import ROOT, commit_all
from tests.stand_in_campaign import BRANCH, build


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Crashes of both kinds, riders, adopts, reverts, an interruption, hostile words, runs of two slots."""
    root = tmp_path_factory.mktemp("made_up")
    ledger = build(root, 40, seed=4, num_examples=200, with_files=False)
    for record in ledger.records():
        result = record.result and replace(record.result, slot=f"slot {record.number % 2}")
        ledger.write(replace(record, result=result, description=f"{record.proposal.description} \u202e\ud83d \x1b[31m"))
    cut = a_record(branch=BRANCH, rules_hash=record.rules_hash, parent=1, description="cut off")
    cut = ledger.reserve(cut, b"")
    judgement = Judgement(why="interrupted: Ctrl-C")
    ledger.write(replace(cut, status="crash", failure=Failure.INTERRUPTED, judgement=judgement))
    for name in ("run.py", "train.toml", "rules.toml", "pyproject.toml"):
        shutil.copy2(ROOT / name, root / name)
    for name in ("environments", "models"):
        (root / name).symlink_to(ROOT / name)
    campaign = Campaign.of(records := ledger.records(), *last_campaign(records))
    assert campaign.baseline
    incumbent = incumbent_config(ledger.stored_config(campaign.baseline), campaign.kept)
    (root / "train.toml").write_bytes(incumbent.source)
    (root / ".gitignore").write_text("runs/\nresults.tsv\nenvironments\nmodels\n")
    commit_all(root, BRANCH)
    return root


@pytest.fixture
def root(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command, "process_root", lambda: made_up)
    return made_up


def invoked(*words: str) -> Result:
    return CliRunner().invoke(commands, [*words, "--json"])


def answer(*words: str, code: int = 0) -> dict[str, Any]:
    """What a command says on stdout: one object, of the shape of its schema if it has one, and nothing else."""
    done = invoked(*words)
    assert done.exit_code == code, (words, done.output)
    return checked(done.stdout)


def checked(text: str) -> dict[str, Any]:
    assert text.isascii()
    [line] = text.splitlines()
    found: dict[str, Any] = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    if found["kind"] in ("experiment", "status"):
        jsonschema.validate(found, json.loads((ROOT / "docs" / "schemas" / f"{found['kind']}.json").read_text()))
    assert [*found][:2] == ["kind", "version"]
    assert found["version"] == 4
    return found


def test_status_says_what_a_fold_believes(root: Path) -> None:
    ledger = Ledger(root)
    campaign = Campaign.of(records := ledger.records(), *last_campaign(records))
    found = answer("status")
    counts = Counts.of(campaign.rows(records))
    assert found["counted"] == {"verdict": counts.verdict, "now": counts.now}
    assert counts.now["reverted"] > 0
    standing = found["incumbent"]["standing"]
    assert [each["experiment"] for each in found["incumbent"]["kept"]] == [each.experiment for each in campaign.kept]
    assert campaign.standing is not None
    for name in ("incumbent", "baseline", "gain"):
        assert standing[name] == pytest.approx(getattr(campaign.standing, name))
    assert found["incumbent"]["rests_on_one_baseline"] is False
    assert (found["is_running"], found["running"], found["night"]) == (False, [], None)
    assert found["damaged"] == []
    checked(json.dumps(found | {"new": 1, "incumbent": found["incumbent"] | {"new": 1}}))  # breaks nobody


def test_history_has_every_run_and_the_scores_by_key_and_value(root: Path) -> None:
    campaign = Campaign.of(records := Ledger(root).records(), *last_campaign(records))
    found = answer("history")
    assert [run["number"] for run in found["runs"]] == [record.number for record in campaign.decided]


def test_show_is_the_record_and_its_row(root: Path) -> None:
    for number in Ledger(root).numbers()[::5]:
        found = answer("show", str(number))
        assert (found.pop("row")["number"], found.pop("files")) == (number, f"runs/{number:04d}")
        record = json.loads((root / "runs" / f"{number:04d}" / "record.json").read_bytes())
        assert found == checked(json.dumps(record)), "record.json has the shape, too"


@pytest.mark.parametrize(("engine", "code"), [("trl", 0), ("prime-rl", 2)])
def test_doctor_exits_as_run_py_could_start(root, monkeypatch, engine, code) -> None:
    """Without GPUs and without prime-rl."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("NIGHTSHIFT_PRIME_RL", "/does/not/exist")
    found = answer("doctor", "--engine", engine, code=code)
    assert {each["engine"] for each in found["checks"]} == {"all", "trl", "prime-rl"}
    assert found["is_ready"] == all(e["problem"] is None for e in found["checks"] if e["engine"] in ("all", engine))
    assert "/does/not/exist" in json.dumps(found)


def test_what_is_no_number_is_null_and_a_lone_surrogate_does_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = replace(COMPARISON, level=float("nan"), notes=("\udc80",))
    print_result(Certified(plan=("time: 1 min",), comparisons=(comparison,)), (), True)
    found = checked(capsys.readouterr().out)
    assert (found["kind"], found["plan"]) == ("certify", ["time: 1 min"])
    assert (found["comparisons"][0]["verdict"], found["comparisons"][0]["level"]) == ("better", None)


def test_an_error_is_one_line_on_stderr_and_nothing_on_stdout(root: Path) -> None:
    for words, code in ((["show", "99"], 2), (["diff", "nothing"], 2)):
        done = invoked(*words)
        assert (done.exit_code, done.stdout) == (code, ""), words
        [line] = [line for line in done.stderr.splitlines() if not line.startswith("reading the records")]
        assert not line.startswith("{")
