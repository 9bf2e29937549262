"""export: tables and files that other programs open, of hostile records, to hostile places, without what is private."""

import csv
import io
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from click.testing import CliRunner, Result

from nightshift.campaign.ledger import Ledger
from nightshift.cli import run as command
from nightshift.cli.main import commands
from nightshift.config.train_toml import parse
from nightshift.report.data import Story
from nightshift.report.export import wandb_runs
from nightshift.report.export.table import as_csv, cell
from tests.campaigns import replace
from tests.stand_in_campaign import BRANCH, build

HOSTILE = '=HYPERLINK("http://x","y")\n\x1b[31m,"quoted", \u202e'


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    """A made-up campaign with crashes and reverts, whose second half has hostile words."""
    made = build(tmp_path_factory.mktemp("made"), 40, num_examples=100)
    for record in made.records()[20:]:
        made.write(replace(record, description=HOSTILE, lesson="@SUM(1)"))
    return made


@pytest.fixture(scope="module")
def story(ledger: Ledger) -> Story:
    return Story.of(ledger, BRANCH)


def test_a_row_an_experiment_with_its_config_and_nothing_that_a_spreadsheet_computes(story: Story) -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(story).decode())))
    assert [int(row["number"]) for row in rows] == [record.number for record in story.records]
    for row, record in zip(rows, story.records, strict=True):
        config = parse(story.ledger.source(record.number))
        assert float(row["trainer.optim.lr"]) == config.get("trainer.optim.lr")
        assert int(row["orchestrator.group_size"]) == config.get("orchestrator.group_size")
        for name, value in row.items():
            is_number = value.replace(".", "").replace("e", "").replace("-", "").isdigit()
            assert not value.startswith(("=", "+", "-", "@", "\t", "\r")) or is_number, (name, value)
            assert value.isprintable()
    assert rows[-1]["description"].startswith("'=HYPERLINK")
    assert any(row["effect_at_decision"].startswith("-") for row in rows)  # a number, and no text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("=1+1", "'=1+1"), ("-1", "'-1"), ("@x", "'@x"), ("\t=1", "'=1"), ("\x1b[1m=1", "'=1"),
        ("+a.b 1 (default 2); +c", "+a.b 1 (default 2); +c"), ("+A(1)", "'+A(1)"), ("+a|b", "'+a|b"), ("+a!b", "'+a!b"),
        ("\uff1d1+1", "'\uff1d1+1"), ("a; =1+1;b", "a;' =1+1;b"), ("a; b - c", "a; b - c"),
        ('a;"=1+1;x', "a;'\"=1+1;x"), (-0.5, "-0.5"), (3e-6, "3e-06"), (True, "true"), (None, ""),
    ],
)  # fmt: skip
def test_cells(value: str | float | bool | None, text: str) -> None:
    assert cell(value) == text


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    made = build(tmp_path / "it", 4, num_examples=50)
    monkeypatch.setattr(command, "process_root", lambda: tmp_path / "it")
    return made


def export(form: str, *words: str) -> Result:
    return CliRunner().invoke(commands, ["export", "--to", form, "--branch", BRANCH, *words])


def test_what_is_no_regular_file_is_not_replaced(checkout: Ledger, tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for place in (pipe, link, Path(os.devnull)):
        done = export("csv", "--output", str(place))
        assert (done.exit_code, done.stdout) == (2, "")
        *_, line = done.stderr.splitlines()  # after the notes
        assert line.endswith("is not a regular file. Name another file: --output PATH, or - for stdout.")
    assert pipe.is_fifo()
    assert Path(os.devnull).is_char_device()


def test_texts_go_to_stdout_alone(checkout: Ledger) -> None:
    (checkout.run_dir(4) / "record.json").write_text("{")
    done = export("csv", "--output", "-")
    assert done.exit_code == 0
    assert done.stdout == as_csv(Story.of(Ledger(checkout.root), BRANCH)).decode()
    assert re.match(r"Not counted: .*0004/record\.json is damaged: .*\n", done.stderr)
    for form in ("model", "wandb"):
        done = export(form, "--output", "-")
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"{form} is not a text" in done.stderr


@pytest.mark.slow
def test_folders_of_wandb_are_replaced_where_they_are_ours(checkout: Ledger, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for _ in range(2):
        done = export("wandb")
        assert done.exit_code == 0, done.output
        assert len([*(checkout.runs_dir / "export").glob("stand-in-wandb/wandb/*/run-*.wandb")]) == 4
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "x").touch()
    done = export("wandb", "--output", str(mine))
    assert (done.exit_code, [path.name for path in mine.iterdir()]) == (2, ["x"])
    assert "mine exists and is not an empty folder. Name a new folder: --output DIR." in done.stderr
    files = [path for path in (checkout.runs_dir / "export").rglob("*") if not path.is_dir()]
    assert not any(path.is_symlink() or path.suffix == ".log" for path in files)


@pytest.mark.slow
def test_no_path_and_no_secret_of_a_record_leaves_for_the_cloud(checkout: Ledger, tmp_path: Path, monkeypatch) -> None:
    """The text is in every free field of all records, in a train.toml and in the environment."""
    pytest.importorskip("wandb")
    secret = "hf_0123456789abcdefghij"
    text = f"as {Path.home()}/notes/plan.txt and {tmp_path}/runs say: {secret}"
    monkeypatch.setenv("MY_API_KEY", secret)
    for record in checkout.records():
        assert record.judgement is not None
        judgement = replace(record.judgement, why=text)
        proposal = replace(record.proposal, description=text, prediction=text, mechanism=text, lesson=text)
        checkout.write(replace(record, health=text, git_action=text, proposal=proposal, judgement=judgement))
    source = checkout.run_dir(2) / "train.toml"
    source.write_text(f"{source.read_text()}\n# {text}\n[trainer.model]\nname = '{Path.home()}/model'\n")
    rows = csv.DictReader(io.StringIO(export("csv", "--output", "-").stdout))
    assert [(row["description"], row["why"]) for row in rows] == [(text, text)] * 4  # the user's own file
    assert export("wandb").exit_code == 0
    files = [path for path in (checkout.runs_dir / "export").rglob("*") if path.is_file()]
    assert len(files) >= 4
    for private in (secret, str(Path.home()), str(tmp_path)):
        assert not [path for path in files if os.fsencode(private) in path.read_bytes()], private


def test_a_run_that_was_not_sent_whole_is_a_line(ledger: Ledger, monkeypatch, capsys) -> None:
    wandb = pytest.importorskip("wandb")

    def init(settings: Any, **fields: Any) -> Any:
        """Begin a run whose connection is lost."""
        run = MagicMock(summary={})
        run.finish.side_effect = TimeoutError if settings.finish_timeout_raises else None
        return run

    monkeypatch.setattr(wandb, "init", init)
    with Path(os.devnull).open() as closed:
        monkeypatch.setattr(sys, "stdin", closed)
        wandb_runs.follow(ledger.root, "mine", 40)
    line = "experiment 0040 may not be uploaded completely. To upload it: wandb sync runs/wandb/*run-*\n"
    assert capsys.readouterr().out == line


def test_links_of_a_person_are_followed_and_those_in_runs_are_not(checkout: Ledger, tmp_path: Path) -> None:
    link, target = tmp_path / "link.csv", tmp_path / "disk" / "x.csv"
    target.parent.mkdir()
    link.symlink_to(target)
    assert export("csv", "--output", str(link)).exit_code == 0
    assert target.is_file()
    assert link.is_symlink()
    place, before = checkout.runs_dir / "export" / "stand-in.csv", target.read_bytes()
    place.parent.mkdir()
    place.symlink_to(target)
    assert export("csv").exit_code == 0
    assert not place.is_symlink()
    assert target.read_bytes() == before
