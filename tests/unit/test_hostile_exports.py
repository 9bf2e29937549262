"""export where something hostile lies in its way, or in the records; and folders that appear whole or not at all."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nightshift.campaign.ledger import Ledger
from nightshift.cli import run as command
from nightshift.cli.main import commands
from nightshift.errors import UsageError
from nightshift.files import whole_folder
from nightshift.report.export.story import Story, as_csv
from tests.stand_in_campaign import BRANCH, build


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    made = build(tmp_path / "it", 4, num_examples=50)
    monkeypatch.setattr(command, "process_root", lambda: tmp_path / "it")
    return made


def export(form: str, *words: str) -> Result:
    return CliRunner().invoke(commands, ["export", "--to", form, "--branch", BRANCH, *words])


def test_what_is_no_regular_file_is_not_replaced(ledger: Ledger, tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for place in (pipe, link, Path(os.devnull)):
        done = export("csv", "--output", str(place))
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "is no regular file. Name another place: --output PATH, or - for stdout." in done.stderr
    assert pipe.is_fifo()
    assert Path(os.devnull).is_char_device()


def test_links_of_a_person_are_followed_and_those_in_runs_are_not(ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    assert export("csv", "--output", f"{tmp_path}/link/x.csv").exit_code == 0
    assert (tmp_path / "disk" / "x.csv").is_file()
    (tmp_path / "late.csv").symlink_to("disk/late.csv")
    assert export("csv", "--output", f"{tmp_path}/late.csv").exit_code == 0
    assert (tmp_path / "disk" / "late.csv").is_file()
    assert (tmp_path / "late.csv").is_symlink()
    (ledger.runs_dir / "export").mkdir()
    (ledger.runs_dir / "export" / "stand-in.csv").symlink_to(tmp_path / "disk" / "x.csv")
    before = (tmp_path / "disk" / "x.csv").read_bytes()
    assert export("csv").exit_code == 0
    assert not (ledger.runs_dir / "export" / "stand-in.csv").is_symlink()
    assert (tmp_path / "disk" / "x.csv").read_bytes() == before


def test_texts_go_to_stdout_alone(ledger: Ledger) -> None:
    done = export("csv", "--output", "-")
    assert done.exit_code == 0
    assert done.stdout == as_csv(Story.of(ledger, BRANCH, BRANCH)).decode()
    for form in ("model", "wandb", "tensorboard"):
        done = export(form, "--output", "-")
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"{form} is no text" in done.stderr


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def fail() -> None:
        with whole_folder(target) as partial:
            (partial / "half").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [*tmp_path.iterdir()] == []
    with whole_folder(target) as partial:
        (partial / "whole").touch()
    assert [path.name for path in target.iterdir()] == ["whole"]
    with pytest.raises(UsageError, match="out holds something already"), whole_folder(target):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("form", ["wandb", "tensorboard"])
def test_folders_of_other_programs_are_replaced_where_they_are_ours(ledger: Ledger, tmp_path: Path, form: str) -> None:
    pytest.importorskip(form)
    places = {"wandb": "stand-in-wandb/wandb/*/run-*.wandb", "tensorboard": "stand-in-tensorboard/*/events*"}
    for _ in range(2):
        done = export(form)
        assert done.exit_code == 0, done.output
        assert len([*(ledger.runs_dir / "export").glob(places[form])]) == 4
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "x").touch()
    done = export(form, "--output", str(mine))
    assert (done.exit_code, [path.name for path in mine.iterdir()]) == (2, ["x"])
    assert "mine holds something already. Name a new folder: --output DIR." in done.stderr
    files = [path for path in (ledger.runs_dir / "export").rglob("*") if not path.is_dir()]
    assert not any(path.is_symlink() or path.suffix == ".log" for path in files)
    assert not any(os.fsencode(tmp_path) in path.read_bytes() for path in files)
