"""What a night leaves for others: its runs in Weights & Biases, logged while they ran, and a tag of the branch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nightshift.campaign.metrics import METRICS_NAME, read_steps
from nightshift.report.data import Story
from nightshift.report.export.wandb_runs import write_runs
from tests.checkouts import git
from tests.conftest import CAMPAIGN
from tests.night_checkout import Ledger, furnish, good_end, good_night, start, start_run

pytestmark = pytest.mark.slow


@pytest.fixture
def root(checkout: Path) -> Path:
    pytest.importorskip("wandb")
    root = furnish(checkout)
    (root / "machine.toml").write_text('[wandb]\nproject = "mine"\n')
    with (root / ".git" / "info" / "exclude").open("a") as file:
        file.write("machine.toml\n")
    git(root, "config", "tag.gpgSign", "true")
    git(root, "config", "tag.forceSignAnnotated", "true")
    git(root, "config", "user.name", "Owner")
    git(root, "config", "user.email", "owner@localhost")
    return root


def entries(data: bytes) -> Iterator[bytes]:
    """Of a run's file: LevelDB's log format in blocks of 32 KiB, after a header; the package reads none."""
    block, place, whole = 32 * 1024, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def runs_below(folder: Path) -> dict[str, dict[str, Any]]:
    """Return group, project, name, first tag, notes, config, summary and number of steps of each run by its id."""
    from wandb.proto import wandb_internal_pb2

    runs = {}
    for path in folder.glob("offline-run-*/run-*.wandb"):
        run, last, summary, num_steps = wandb_internal_pb2.RunRecord(), {}, dict[str, Any](), 0
        for data in entries(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            num_steps += record.HasField("history")
            summary |= {item.key: json.loads(item.value_json) for item in record.summary.update if item.key}
            if record.HasField("run"):
                run = record.run
                last |= {item.key: item.value_json for item in run.config.update if item.key != "_wandb"}
        summary = {key: value for key, value in summary.items() if not key.startswith("_") and key != "training_step"}
        del summary["now"]  # may change when later experiments are decided, and with it name and tags
        words = (run.run_group, run.project, run.display_name.split(",")[0], run.tags[0], run.notes)
        runs[run.run_id] = {"words": words, "config": last, "summary": summary, "steps": num_steps}
    return runs


def test_a_night_logs_what_the_export_writes_and_tags_its_branch(root, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    good_end(start_run(root, "--engine", "trl", "--budget-seconds", "30", "--branch", CAMPAIGN), root)
    output, errors = good_night(root, agent="random", experiments=2)
    assert "W&B" not in output + errors
    story = Story.of(Ledger(root), None)
    live = runs_below(root / "runs" / "wandb")
    for row, run in zip(story.rows, (run for _, run in sorted(live.items())), strict=True):
        numbers = {name: value for name, value in row.cells.items() if isinstance(value, int | float)}
        assert run["summary"].items() >= (numbers | {"verdict": row.verdict}).items()
        assert run["steps"] == len(read_steps(story.ledger.run_dir(row.number) / METRICS_NAME))
        assert "trainer.optim.lr" in run["config"]
    assert live == runs_below(write_runs(story, tmp_path / "export", "mine"))
    first, commit = story.records[0], git(root, "rev-parse", "HEAD").strip()
    assert len(live) == 3
    assert all(f"-{(first.commit or '')[:8]}-" in name for name in live)

    [name] = git(root, "for-each-ref", "--format=%(refname:lstrip=2)", "refs/tags").split()
    assert name.startswith(f"night/{story.branch}/")
    assert git(root, "rev-parse", f"{name}^{{commit}}").strip() == commit
    message = git(root, "for-each-ref", "--format=%(contents)", f"refs/tags/{name}")
    assert message.startswith(f"Night on {story.branch}\n\nnot certified\n\n")
    assert (root / "results.tsv").read_text().strip() in message
    tagger = git(root, "for-each-ref", "--format=%(taggername) %(taggeremail)", f"refs/tags/{name}")
    assert tagger.strip() == "Owner <owner@localhost>"  # as of Nightshift's commits
    assert f"tagged as {name}" in output + errors


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"WANDB_MODE": "offline", "WANDB_X_SERVICE_WAIT": "0.0001"}, "W&B: nothing more is logged: "),
        ({"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}, "writing offline runs to runs/wandb"),
    ],
)
def test_a_failure_of_wandb_is_a_line(root: Path, monkeypatch, variables: dict[str, str], line: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    night = start(root, agent="random", experiments=2)
    output, errors = night.communicate()
    assert night.returncode == 0, errors
    assert (output + errors).count("W&B: ") == 1
    assert line in output + errors
    assert len(Story.of(Ledger(root), None).records) == 2
