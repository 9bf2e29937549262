"""Whatever stands in place of a file below runs/: nothing hangs, nothing is a traceback, nothing is written through."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.campaigns import COMPARISON
from tests.checkouts import small_checkout
from tests.night_checkout import finish, furnish, leftovers, start_run, until_training
from tests.stand_ins import fault
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
GOOD = b"max_steps = 3\n[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = 6e-7\n"
_ACCESS = {"number": 1, "branch": "autoresearch/test", "rules_hash": "0", "configs": {"baseline": "b"}, "token": "k"}
_LINE = {
    "number": 1, "time": "2026-11-22T07:00:00+00:00", "event": "access", "file": "certify/0001/baseline-1/job.json",
    "sha256": "0" * 64, "before": "",
}  # fmt: skip
_CERTIFICATE = msgspec.to_builtins(COMPARISON)
_NIGHT = {
    "request": {"agent": "claude", "hours": 8.0}, "branch": "autoresearch/test", "rules_hash": "0",
    "started": "2026-11-22T07:00:00+00:00", "first": 1, "pid": 1, "version": 3, "cause": None,
}  # fmt: skip
_ANSWER = {"environment": "nightshift_arithmetic", "key": "k", "score": 1.0, "answer": "1", "completion": "#### 1"}
# Those of one line are replaced together: no command reads two of them, or else one that is damaged ends nothing.
FILES = (
    ["runs/0002/record.json"],
    ["runs/0002/train.toml"],
    ["runs/.controller", "runs/certify", "runs/agent", "results.tsv"],
    [
        *(f"runs/0002/{name}" for name in ("config.json", "job.json", "result.json", "worker.log", "metrics.jsonl")),
        *(f"runs/0002/{name}" for name in ("evaluation.jsonl", "rollouts.jsonl", "progress.json")),
        *("runs/night.json", "runs/certify/0001/comparison.json", "runs/journal.jsonl"),
        *(f"runs/{name}" for name in ("report.html", "report.md", "progress.png", "night.txt", "detached.log")),
    ],
)
INSTEAD: dict[str, dict[str, Any]] = {
    "a FIFO": {"fifo": None},
    "a link to /dev/zero": {"link": "/dev/zero"},
    "a link to nowhere": {"link": "nowhere"},
    "a link to itself": {"link": "record.json"},
    "a folder": {"folder": None},
    "a terabyte": {"bytes": 1 << 40},
    "200,000 brackets": {"text": "[" * 200_000},
    "200,000 braces": {"text": '{"a":' * 200_000},
    "NaN": {"text": "NaN\n"},
    "null": {"text": "null\n"},
    "a text": {"text": '"x"\n'},
    "no UTF-8": {"text": "\udcff\udcfe\x00"},
    "nothing": {"text": ""},
}
QUICK = ("a FIFO", "a link to /dev/zero", "a terabyte", "200,000 brackets", "NaN")


def rows(*many: dict[str, Any]) -> dict[str, Any]:
    return {"text": "".join(json.dumps(row) + "\n" for row in many)}


# Right in form, and not in content.
CONTENT: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}: {index}": (name, rows(*each))
    for name, contents in {
        "runs/night.json": [
            [_NIGHT | {"started": "yesterday"}],
            [_NIGHT | {"started": "2026-11-22T07:00:00"}],
            [_NIGHT | {"started": "0001-01-01T00:00:00+00:00"}],
            [_NIGHT | {"request": {"agent": "claude", "hours": 1e300}}],
            [_NIGHT | {"pid": 2**62}],
            [_NIGHT | {"pid": -(2**62)}],
            [_NIGHT | {"cause": "\x1b[2J" + "x" * 100_000}],
            [_NIGHT | {"pending": [{"source": "////", "proposal": {"description": 1}}]}],
        ],
        "runs/certify/0001/comparison.json": [
            [_CERTIFICATE | {"created": "now"}],
            [_CERTIFICATE | {"estimate": {"difference": 1e308, "stderr": 0.0, "df": 1.0, "interval": [-1e308, 1e308]}}],
            [_CERTIFICATE | {"num_seeds": {}}],
            [_CERTIFICATE | {"num_examples": 2**62, "access": -1}],
        ],
        "runs/journal.jsonl": [
            [_LINE | {"access": _ACCESS | {"number": 0}}],
            [_LINE | {"access": _ACCESS | {"number": 2**62}}],
            [_LINE | {"number": 10**15}],
            [_LINE | {"time": "\x1b[2J", "file": "\x1b[2J"}],
            [_LINE | {"access": _ACCESS}, _LINE | {"number": -1, "file": "../../x"}],
            [_LINE | {"event": "seen"}, _LINE | {"file": "0002/record.json", "event": "decided"}],
        ],
        "runs/0002/metrics.jsonl": [
            [{"step": n, "time": 1e308, "reward_mean": 1e308, "entropy": -1e308, "kl": 1e308} for n in range(9)],
            [{"step": n, "grad_norm": 1e-320, "loss": -1e308, "completion_tokens_mean": 1e308} for n in range(9)],
            [{"step": n, "generate_seconds": 1e308, "train_seconds": 1e308} for n in range(9)],
            [{"step": 2**53}, {"step": 2**53 + 1}, {"step": -1}],
            [{"step": n} for n in range(200_000)],
        ],
        "runs/0002/evaluation.jsonl": [
            [_ANSWER | {"completion": "</script><script>\u202e\x1b[2J" * 1000, "num_tokens": 2**62, "key": "\x00"}],
            [_ANSWER | {"score": 1e308}, _ANSWER | {"score": -1e308, "truncated": True}],
            [_ANSWER | {"environment": "../../x"}],
        ],
        "runs/0002/progress.json": [
            [{"phase": "training", "num_steps": 2**62, "seconds_left": 1e308, "reward": -1e308}],
        ],
    }.items()
    for index, each in enumerate(contents)
}  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A campaign of a baseline and a keep, in a checkout that the stand-in can run in."""
    root = furnish(small_checkout(tmp_path_factory.mktemp("hostile")), GOOD)
    for config in (GOOD, GOOD.replace(b"6e-7", b"3e-6")):
        (root / "train.toml").write_bytes(config)
        code, _, stderr = finish(start_run(root, "--engine=trl", "--budget-seconds=1"))
        assert code == 0, stderr
    yield root
    for process in leftovers(root):
        process.kill()


def read_all(root: Path, cases: list[tuple[str, list[tuple[str, dict[str, Any]]]]]) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests" / "stand_in_reader.py"), str(root)]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "instead", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in INSTEAD]
)
def test_no_file_in_place_of_another_hangs_a_reader_or_ends_it_with_a_traceback(measured: Path, instead: str) -> None:
    content = INSTEAD[instead]
    cases = [(files[0], [(file, content) for file in files]) for files in FILES]
    assert read_all(measured, [("untouched", []), *cases]) == {}


def test_no_content_does(measured: Path) -> None:
    assert read_all(measured, [(name, [change]) for name, change in CONTENT.items()]) == {}


def test_what_is_planted_beside_a_run_under_way_is_replaced_and_written_through_by_nobody(measured, tmp_path):
    fault(measured, "hold", once=False)
    outside = tmp_path / "outside"
    outside.write_text("precious")
    with start_run(measured, "--engine=trl", "--budget-seconds=1", "--again") as process:
        until_training(measured, process)
        folder = wait_for(lambda: next(measured.glob("runs/0003/metrics.jsonl"), None)).parent
        os.mkfifo(folder / "evaluation.jsonl")
        for name in ("result.json", "rollouts.jsonl", "weights"):
            (folder / name).symlink_to(outside)
        (folder / "progress.json").unlink()
        (folder / "progress.json").symlink_to(outside)
        (measured / "stand-in.json").unlink()
        code, _, stderr = finish(process)
    assert "Traceback" not in stderr
    assert code == 1  # there is no place for its weights
    assert outside.read_text() == "precious"
