"""A thousand faults: after each one, is anything left behind, lost, doubled or half done, and does the next run work?

\b
    uv run benchmarks/faults.py --folder FOLDER                       1,000 faults, 18 minutes on 2 cores
    uv run benchmarks/faults.py --folder FOLDER --num 20 --only "worker killed"

Draws faults by seed from a matrix (fault_matrix.py): which process or file x which moment x which failure.
Each strikes a real run.py in a fresh checkout in mid-campaign, then a person sets right what was broken from
outside (makes room, removes the lock, switches back), and the next experiment runs. Checked after each: the exit
code, no traceback, no process, no lock, every record closed, results.tsv as the records say, the branch as the
verdicts say, nothing left over, and that the next experiment is measured.

Nineteen of twenty strike the stand-in engine (saboteur.py trains nothing, the selection set has 100 examples; for
prime-rl the stand-in programs of the tests), one of twenty the real trl engine in whole processes (fault_trl.py).
Resumable: FOLDER/faults.jsonl holds what is finished. A full disk and read-only folders need root and Linux:
elsewhere those rows are counted as skipped.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import fault_deeds
import fault_scene as scenes
import fault_trl
import psutil
from fault_matrix import FAMILIES, REAL, WORKER_EVENTS, Fault, Moments, draw
from machine import RESULTS, machine, write_result

from nightshift.engines.prime_rl.ports import free_ports
from tests.night_checkout import strangers

DISK_SIZE = "300m"  # the engine asks for 200 MB
HANG_DEADLINE_SECONDS = 3.0
PRIME_RL_DEADLINE_SECONDS = 30.0
IN_THE_WORLD = ("disk full", "folder read-only", "file damaged before", "file damaged in flight", "git state changed")

Row = dict[str, Any]


def play(fault: Fault, lane: Path, templates: Path) -> Row:
    """One fault, from a fresh checkout to the next experiment; its row."""
    began = time.monotonic()
    disk = _mounted(lane / "disk") if fault.family == "disk full" else None
    if fault.family == "disk full" and disk is None:
        return _row(fault) | {"skipped": "mounting a small file system needs root"}
    root = (disk or lane) / "checkout"
    if fault.family == REAL:
        fault_trl.set_up(templates / "real" / "clone", root)
        codes, is_struck = fault_trl.strike(fault, root)
    else:
        scenes.set_up(fault.scene, templates, root)
        codes, is_struck = _strike(fault, root, lane / "struck")
    gone_seconds = scenes.seconds_until_gone(root)
    said = (root.parent / "stderr").read_text()
    found = [f"exit code {code}" for code in codes if code not in _expected(fault, is_struck)]
    found += ["a traceback"] if "Traceback" in said else []
    found += ["it hung"] if None in codes else []
    found += [f"processes were left: {fault.failure}"] if gone_seconds is None else []
    record = next((r for r in reversed(scenes.readable(root))), None)
    if fault.family in IN_THE_WORLD and is_struck:
        fault_deeds.undo(fault, root)
    told, after = scenes.next_experiment(root, fault.scene, fault_trl.run if fault.family == REAL else scenes.run)
    found += after + scenes.check(root, _tolerance(fault, told))
    return _row(fault) | {
        "struck": is_struck,
        "exit_codes": codes,
        "record": None if record is None else f"{record.status} {record.failure or ''}".strip(),
        "told": told,
        "problems": found,
        "said": said.splitlines()[-1:] if found else [],
        "gone_seconds": gone_seconds,
        "seconds": time.monotonic() - began,
    }


def _row(fault: Fault) -> Row:
    return {name: getattr(fault, name) for name in ("number", "family", "scene", "victim", "moment", "failure")}


def _strike(fault: Fault, root: Path, struck: Path) -> tuple[list[int | None], bool]:
    """Run the experiment with the fault in it: exit codes of the run.py, and whether the moment came."""
    struck.unlink(missing_ok=True)
    flags = scenes.flags_of(fault.scene)
    run = partial(scenes.start, root, flags)
    if fault.family == "two run.py at once":
        pids = [run()]
        time.sleep(float(fault.failure.split()[1]))
        pids += [run(name="-2"), run(name="-3")]
        return [scenes.finish(pid) for pid in pids], True
    if fault.scene == "prime-rl":
        run = partial(run, deadline_seconds=PRIME_RL_DEADLINE_SECONDS)
        scenes.install_prime_rl(root, None, 1)
    if fault.family.startswith("prime-rl"):
        return _strike_prime_rl(fault, root, run)
    if fault.moment == "before":
        is_struck = fault_deeds.do(fault, root)
        return [scenes.finish(run())], is_struck
    if fault.moment in WORKER_EVENTS:
        order = {"event": fault.moment, "victim": fault.victim, "failure": fault.failure}
        (root / "fault.json").write_text(json.dumps(order))
        is_hang = fault.family == "worker hangs" or fault.failure == "closed pipe"
        seconds = HANG_DEADLINE_SECONDS if is_hang else scenes.DEADLINE_SECONDS
        code = scenes.finish(run(deadline_seconds=seconds))
        is_struck = not (root / "fault.json").exists()
        (root / "fault.json").unlink(missing_ok=True)
        return [code], is_struck
    clock = scenes.Clock()
    code = scenes.finish(run(strike=_at(fault.moment, struck, partial(_act, fault, root, clock)), clock=clock))
    if fault.family == "run.py killed twice":
        scenes.seconds_until_gone(root)
        ordinal = int(fault.failure.split()[5])
        total = iter(range(1, 1_000_000))
        second = run(strike=lambda step, number: _kill_self() if next(total) == ordinal else None)
        return [code, scenes.finish(second)], struck.exists()
    return [code], struck.exists()


def _at(moment: str, struck: Path, act: Callable[[], bool]) -> Callable[[str, int], None]:
    """Act once, before the file operation that the moment names."""
    step, _, ordinal = moment.rpartition(" ")

    def strike(now: str, number: int) -> None:
        if (now, number) == (step, int(ordinal)):
            struck.touch()
            if not act():
                struck.unlink()

    return strike


def _act(fault: Fault, root: Path, clock: scenes.Clock) -> bool:
    """In run.py itself, at the moment; False if there was nothing to strike at."""
    if fault.family == "file operation refused":
        raise scenes.refuse(fault.failure)
    if fault.family == "clock jump":
        clock.jump_seconds = float(fault.failure.split()[0])
        return True
    if fault.family in IN_THE_WORLD:
        return fault_deeds.do(fault, root)
    os.kill(os.getpid(), signal.Signals[fault.failure.partition(",")[0]])
    return True


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _strike_prime_rl(fault: Fault, root: Path, run: Callable[..., int]) -> tuple[list[int | None], bool]:
    """Stand-in programs that misbehave, that get a signal, or whose port is taken."""
    if fault.victim == "stand-in programs":
        scenes.install_prime_rl(root, fault.failure, int(fault.moment.split()[1]))
        codes: list[int | None] = [scenes.finish(run())]
        scenes.install_prime_rl(root, None, 1)
        return codes, True
    if fault.family == "prime-rl port taken":
        ports = free_ports()
        with scenes.listening(getattr(ports, fault.failure)):
            return [scenes.finish(run(ports=lambda: ports))], True
    pid = run()
    victim = _wait_for_program(fault, root, pid)
    if victim is not None:
        victim.send_signal(signal.Signals[fault.failure])
    return [scenes.finish(pid)], victim is not None


def _wait_for_program(fault: Fault, root: Path, pid: int) -> psutil.Process | None:
    """The process to strike, once its moment has come; None if run.py ended before."""
    while True:
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return None
        there = fault.moment == "starting" or any(
            root.glob(f"runs/*/run-1/prime-rl/broadcasts/step_{fault.moment.split()[1]}/STABLE")
        )
        if there and fault.victim == "run.py":
            return psutil.Process(pid)
        for process in strangers(root) if there else ():
            words = process.cmdline()
            if fault.victim in words and any("stand_in_prime_rl" in word for word in words):
                return process
        time.sleep(0.01)


def _expected(fault: Fault, is_struck: bool) -> set[int]:
    """Exit codes that a fault may lead to: 0 to 2 as documented, 130 if asked to stop, minus the signal if killed."""
    name = fault.failure.partition(",")[0]
    is_at_run = "run.py" in fault.victim and name.startswith("SIG") and name != "SIGSTOP"
    if not is_struck or not is_at_run or fault.family == "two run.py at once":
        return {0, 1, 2}
    number = -int(signal.Signals[name])
    if name in ("SIGTERM", "SIGINT", "SIGHUP"):
        return {130, number}  # the signal itself where nothing is under way: in the last line of the summary
    return {0, 1, 2, number} if fault.family == "run.py killed twice" else {number}


def _tolerance(fault: Fault, told: Sequence[str]) -> scenes.Tolerance:
    destroys = "." not in fault.victim.partition("/")[0] and fault.victim.startswith("runs/")
    return scenes.Tolerance(
        gaps=destroys or "move the damaged record away" in told,
        foreign=fault.scene.endswith("committed")
        or (fault.family == "git state changed" and "committed" in fault.failure),
    )


def _mounted(folder: Path) -> Path | None:
    """An empty file system of 300 MB at `folder`; None where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs", str(folder)]
    return folder if subprocess.run(command, capture_output=True, check=False).returncode == 0 else None


def play_all(faults: Sequence[Fault], lane: Path, templates: Path, output: Path) -> None:
    """Play faults one after the other; a row each is appended to `output`."""
    lane.mkdir(parents=True, exist_ok=True)
    for index, fault in enumerate(faults, start=1):
        try:
            played = play(fault, lane, templates)
        except Exception:  # of this benchmark, or of the check itself: a finding too
            played = _row(fault) | {"struck": True, "problems": [f"benchmark: {traceback.format_exc()}"]}
            for process in strangers(lane):
                process.kill()
        with output.open("a") as file:
            file.write(json.dumps(played) + "\n")
        told = "; ".join(played.get("problems", [])) or "ok"
        print(f"{lane.name} {index}/{len(faults)} {fault.number}: {fault.family}, {fault.scene}: {fault.victim}, "
              f"{fault.moment}, {fault.failure}: {told}", file=sys.stderr, flush=True)  # fmt: skip
    subprocess.run(["umount", "-l", str(lane / "disk")], capture_output=True, check=False)


def summarize(rows: Sequence[Row]) -> list[Row]:
    """One row a family, in the order of the matrix."""
    found = []
    for family in FAMILIES:
        ours = [r for r in rows if r["family"] == family]
        played = [r for r in ours if "skipped" not in r]
        codes = [code for r in played for code in r.get("exit_codes", ())[:1]]
        gone = [r["gone_seconds"] for r in played if r.get("gone_seconds") is not None]
        seconds = [r["seconds"] for r in played if "seconds" in r]
        if ours:
            found.append({
                "family": family,
                "faults": len(ours),
                "skipped": len(ours) - len(played),
                "struck": sum(bool(r.get("struck")) for r in played),
                "measured": codes.count(0),
                "crash": codes.count(1),
                "refused": codes.count(2),
                "stopped": codes.count(130),
                "killed": sum(code is not None and code < 0 for code in codes),
                "told_a_fix": sum(bool(r.get("told")) for r in played),
                "with_problems": sum(bool(r["problems"]) for r in played),
                "gone_seconds_max": round(max(gone), 1) if gone else None,
                "seconds_median": round(statistics.median(seconds), 2) if seconds else None,
            })  # fmt: skip
    return found


def table(rows: Sequence[Row], findings: Sequence[Row]) -> str:
    """The summary for people, and every problem."""
    columns = ("faults", "skipped", "struck", "measured", "crash", "refused", "stopped", "killed", "told_a_fix",
               "with_problems", "gone_seconds_max", "seconds_median")  # fmt: skip
    heads = ("faults", "skipped", "struck", "measured", "crash", "refused", "stopped", "killed", "told", "PROBLEMS",
             "gone s", "median s")  # fmt: skip
    lines = [f"{'':30}" + "".join(f"{head:>10}" for head in heads)]
    total = {c: sum(r[c] for r in rows) for c in columns[:-2]} | dict.fromkeys(columns[-2:])
    for row in (*rows, {"family": "all", **total}):
        lines.append(f"{row['family']:30}" + "".join(f"{'' if row[c] is None else row[c]:>10}" for c in columns))
    return "\n".join(lines + [json.dumps(finding) for finding in findings])


@click.command(help=__doc__)
@click.option("--num", default=1000, show_default=True, type=click.IntRange(1), help="Faults.")
@click.option("--seed", default=0, show_default=True)
@click.option("--only", type=click.Choice(FAMILIES), multiple=True, help="Draw from these classes alone.")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Scratch; holds faults.jsonl.")
@click.option("--lanes", default=os.cpu_count() or 1, show_default=True, help="Checkouts side by side.")
@click.option("--real/--no-real", default=True, help="Whether to play those with the real engine, too.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "faults.json", help="The result as JSON.")
def main(num: int, seed: int, only: tuple[str, ...], folder: Path, lanes: int, real: bool, output: Path) -> None:
    """Draw, play what is not finished, print the table, write the result; exit code 1 if a fault left a problem."""
    kind, folder = machine(), folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    finished = folder / f"faults-{seed}.jsonl"
    moments = _moments(folder)
    faults = [draw(n, seed, moments, only[n % len(only)] if only else None) for n in range(num)]
    done = {(r["number"], r["family"]) for r in _rows(finished)}
    todo = [f for f in faults if (f.number, f.family) not in done and (real or f.family != REAL)]
    stand_in, trl = [f for f in todo if f.family != REAL], [f for f in todo if f.family == REAL]
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(
            target=play_all, args=(stand_in[i::lanes], folder / f"lane-{i}", folder / "templates", finished)
        )
        for i in range(lanes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if trl:
        fault_trl.make_template(folder / "templates" / "real" / "clone")
    play_all(trl, folder / "real", folder / "templates", finished)
    wanted = {(f.number, f.family) for f in faults}
    rows = [r for r in _rows(finished) if (r["number"], r["family"]) in wanted]
    summary, findings = summarize(rows), [r for r in rows if r.get("problems")]
    command = f"uv run benchmarks/faults.py --num {num} --seed {seed}" + "".join(f' --only "{name}"' for name in only)
    figures = {"seed": seed, "num": len(rows), "families": summary, "findings": findings}
    write_result(output, command, figures, kind)
    print(table(summary, findings))
    sys.exit(1 if findings else 0)


def _moments(folder: Path) -> Moments:
    """Recorded once for a folder, so that a resumed run draws the same faults."""
    path = folder / "moments-of-scenes.json"
    if not path.exists():
        made = scenes.make_templates(folder / "templates")
        path.write_text(json.dumps(made))
    moments: Moments = json.loads(path.read_text())
    return moments


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
