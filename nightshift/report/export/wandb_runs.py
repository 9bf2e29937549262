"""Runs of Weights & Biases, one per experiment. `export --to wandb` writes offline runs. `night --wandb PROJECT`, or
`[wandb] project` in machine.toml, logs experiments while they run, from a separate process that nothing waits for.

Both write numbers, verdicts, keys and their values: no path of this machine, no environment variable and no free text.
"""

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from nightshift.agents.history import load_configs
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.metrics import METRICS_NAME, read_steps
from nightshift.campaign.records import Record
from nightshift.campaign.results import UNDECIDED, Row, verdict_of
from nightshift.errors import EngineError, Interrupted, UsageError
from nightshift.executors.process import ProcessGroup, python_command, python_path
from nightshift.files import remove_tree, whole_folder
from nightshift.report.data import Story
from nightshift.report.export.table import values
from nightshift.text import clean
from nightshift.waiting import waiting

FIX = "Install the extra: uv sync --extra wandb."
_POLL_SECONDS = 5.0
_INIT_SECONDS = 30.0  # then the runs are offline
_END_SECONDS = 60.0  # to send the last steps, which are on disk, too
_GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL
_FILES = "runs/wandb/*run-*"


def _package() -> Any:
    try:
        import wandb
    except ImportError:
        raise EngineError("the package wandb is not installed", FIX) from None
    return wandb


def _open(story: Story, record: Record, folder: Path, project: str, mode: Any) -> Any:
    """Begin the run of an experiment below `folder`/wandb, and send it in the mode `online`."""
    wandb, first = _package(), story.records[0]
    # Two clones can begin at the same commit, but hardly in the same second.
    group = f"{story.tag}-{(first.commit or '')[:8]}-{datetime.fromisoformat(first.started):%y%m%d%H%M%S}"
    run = wandb.init(
        project=project,
        id=f"{group}-{record.number:04d}",
        group=group,
        dir=folder,
        config=values(load_configs(story.ledger, [record]).get(record.number))
        | {"rules": record.rules_hash, "parent": record.parent},
        settings=wandb.Settings(
            mode=mode, silent=True, console="off", disable_git=True, disable_code=True, save_code=False,
            disable_job_creation=True, x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True,
            x_save_requirements=False, host="nightshift", username="", email="", program="nightshift",
            init_timeout=_INIT_SECONDS, finish_timeout=_INIT_SECONDS, finish_timeout_raises=True,
            reinit="create_new",
        ),
    )  # fmt: skip
    run.define_metric("training_step")
    run.define_metric("*", step_metric="training_step")
    return run


def _log_steps(run: Any, run_dir: Path, num_logged: int = 0) -> int:
    """Log the steps after the first `num_logged`. Return the number of all steps."""
    steps = read_steps(run_dir / METRICS_NAME)
    for step in steps[num_logged:]:
        fields = msgspec.to_builtins(step)
        rewards = {f"rewards/{name}": value for name, value in (fields.pop("rewards") or {}).items()}
        fields["training_step"] = fields.pop("step")
        run.log({name: value for name, value in (fields | rewards).items() if value is not None})
    return len(steps)


def _close(run: Any, row: Row) -> None:
    """Write the result of an experiment and end its run. TimeoutError if the run is on disk only, not sent."""
    verdict = row.verdict or UNDECIDED
    run.name = f"{row.number:04d} {row.status}"
    run.tags = tuple(filter(None, (verdict, row.now)))
    run.notes = clean(", ".join(row.changes))
    numbers = {name: value for name, value in row.cells.items() if isinstance(value, int | float)}
    run.summary.update({"verdict": verdict, "now": row.now, **numbers})
    run.finish()


def write_runs(story: Story, folder: Path, project: str) -> Path:
    """Write a new folder with an offline run of each experiment, without the package's own logs, which contain paths.
    Return `folder`/wandb. EngineError if the package is not installed."""
    wandb = _package()
    with whole_folder(folder) as partial:
        try:
            for record, row in zip(story.records, story.rows, strict=True):
                run = _open(story, record, partial, project, "offline")
                _log_steps(run, story.ledger.run_dir(record.number))
                _close(run, row)
        except (wandb.Error, TimeoutError) as error:
            raise EngineError(f"wandb wrote no runs: {error}") from None
        finally:
            wandb.teardown()
        for path in (partial / "wandb").iterdir():
            for unwanted in (path,) if path.is_symlink() else (path / "logs", path / "tmp"):
                remove_tree(unwanted)
    return folder / "wandb"


# -- while experiments run ----------------------------------------------------------------------------


@contextmanager
def live_runs(root: Path, project: str, note: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Log the experiments of a checkout to a W&B project, from a separate process. Yields a function that prints the
    messages of this process, among them its failures."""
    ledger, pipe, seconds = Ledger(root), subprocess.PIPE, _END_SECONDS
    first = next((r.number for r in ledger.readable()[0] if r.judgement is None), ledger.next_number())
    group = ProcessGroup("wandb", _GRACE_SECONDS)
    command = python_command("-m", __name__, os.fspath(root), project, str(first))
    env, log = {**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"}, ledger.runs_dir / "wandb.log"
    child = group.start("W&B", command, log_path=log, env=env, cwd=root, stdin=pipe, stdout=pipe)
    assert child.stdin is not None
    assert child.stdout is not None
    output = child.stdout
    os.set_blocking(output.fileno(), False)

    def report() -> None:
        for line in (output.read() or b"").decode(errors="replace").splitlines():
            note(f"W&B: {clean(line)}")

    try:
        yield report
    except Interrupted:
        seconds = 3.0
        raise
    finally:
        try:
            child.stdin.close()
            with waiting("sending the last steps to W&B", seconds), suppress(subprocess.TimeoutExpired):
                child.wait(seconds)
            report()
        finally:
            group.stop()


def follow(root: Path, project: str, first: int) -> None:
    """Log the experiments from number `first` on while they run, until stdin is closed."""
    ledger, wandb, mode = Ledger(root), _package(), os.environ.get("WANDB_MODE", "online")
    runs, num_logged, ended = dict[int, Any](), dict[int, int](), set[int]()
    is_over = False
    while not is_over:
        is_over = bool(select.select([sys.stdin], [], [], _POLL_SECONDS)[0])
        try:
            for number in (number for number in ledger.numbers() if number >= first and number not in ended):
                with suppress(UsageError):  # the controller reports damaged records
                    if (record := ledger.read(number)) is None:
                        continue
                    if number not in runs:
                        story = Story.of(ledger, record.branch, record.rules_hash)
                        runs[number] = _open(story, record, ledger.runs_dir, project, mode)
                    num_logged[number] = _log_steps(runs[number], ledger.run_dir(number), num_logged.get(number, 0))
                    if verdict_of(record) is not None:
                        rows = Story.of(ledger, record.branch, record.rules_hash).rows
                        _close(runs[number], next(row for row in rows if row.number == number))
                        ended.add(number)
        except TimeoutError:
            ended.add(number)
            line = f"experiment {number:04d} may not be uploaded completely. To upload it: wandb sync {_FILES}"
            sys.stdout.write(f"{line}\n")
            is_over = False
        except wandb.Error as error:
            if mode != "online":
                raise
            sys.stdout.write(
                f"{clean(str(error))}; writing offline runs to runs/wandb. To upload them: wandb sync {_FILES}\n"
            )
            wandb.teardown()
            mode, is_over = "offline", False
            runs, num_logged = {}, {}  # write them again from the first step


if __name__ == "__main__":
    os.nice(10)  # below the runs
    try:
        follow(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    except Exception as error:
        sys.stdout.write(f"nothing more is logged: {type(error).__name__}: {error}\n")
        raise
