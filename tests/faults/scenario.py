"""A throw-away checkout in mid-campaign, run.py in it with a strike prepared, and what must be true afterwards.

The stand-in engine's run.py is a fork of this process, which has imported everything: a real process with the
real front door, engine, supervisor, watchdog, git and files, but half a second younger. What trains is the
stand-in worker (saboteur.py), and its selection set has 100 examples.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime as real_datetime
from datetime import timedelta, tzinfo
from pathlib import Path
from typing import Any

from fault_deeds import BRANCH, git
from fault_matrix import SCENES, Moments

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import run as front_door  # noqa: E402  (it takes its own folder off the path again)

sys.path.insert(0, str(ROOT))
from nightshift import experiment, preparation  # noqa: E402, F401  (imported for the forks)
from nightshift import setup as lab  # noqa: E402
from nightshift.campaign.ledger import Ledger  # noqa: E402
from nightshift.campaign.results import COLUMNS, row  # noqa: E402
from nightshift.engines.prime_rl import engine as prime_rl  # noqa: E402
from nightshift.engines.prime_rl.engine import PrimeRlEngine  # noqa: E402
from nightshift.engines.prime_rl.installation import Installation, Pins  # noqa: E402
from nightshift.engines.prime_rl.session import Timing  # noqa: E402
from nightshift.engines.trl.engine import TrlEngine  # noqa: E402
from nightshift.git.repo import Repo  # noqa: E402
from nightshift.records import Record  # noqa: E402
from nightshift.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL, Rules  # noqa: E402
from tests import stand_in_prime_rl  # noqa: E402
from tests.night_checkout import strangers  # noqa: E402

SABOTEUR = Path(__file__).with_name("saboteur.py")
NUM_SELECTION = 100
RULES = replace(ARITHMETIC_TRL, environments=(replace(ARITHMETIC_TRL.environments[0], num_selection=NUM_SELECTION),))
PRIME_RL_RULES = replace(
    GSM8K_PRIME_RL, environments=(replace(ARITHMETIC_TRL.environments[0], num_selection=16, num_train=64),)
)
DEADLINE_SECONDS = 60.0
FLAGS = ("--budget-seconds", "1", "--engine", "trl")
RATES = {"baseline": 2e-6, "better": 1.2e-5, "worse": 1e-3, "again": 2e-6, "prime-rl": 3e-6}
NEXT_RATES = (7e-6, 8e-6, 9e-6, 1.1e-5)  # of the experiments after the fault
TAKES_SECONDS = 90.0  # an experiment; more is a hang
GONE_SECONDS = 20.0  # until the last process is gone: the watchdog's second, two graces, and a busy machine
HEAVY_NAMES = ("weights", "weights.partial", ".weights.partial")

# The steps of an experiment, by the outermost of these functions on the stack.
STEPS = {
    "prepare_missing": "prepare", "finish_earlier": "recover", "admit": "admit", "Ledger.reserve": "reserve",
    "Ledger.write": "write", "TrlEngine.open": "open", "TrlSession.train": "train", "evaluate": "evaluate",
    "TrlSession.close": "stop", "settle": "settle", "Ledger.close": "close", "Ledger.keep_model": "keep model",
    "PrimeRlSession.train": "train",
}  # fmt: skip
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "subprocess.Popen")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

Strike = Callable[[str, int], None]  # called before a file operation: (step, its number in that step)


def config_of(rate: float, extra: str = "max_steps = 3\n") -> bytes:
    """A train.toml that ends after three steps."""
    return f"{extra}[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = {rate!r}\n".encode()


def make_templates(folder: Path) -> Moments:
    """`folder`/baseline and `folder`/campaign, to be copied for each fault; and the moments of every scene."""
    baseline, campaign = folder / "baseline", folder / "campaign"
    baseline.mkdir(parents=True)
    git(baseline, "init", "--quiet", "--template=", "--initial-branch", "main")
    for name in ("models", "environments", "nightshift"):  # copies: an edit during the hours is not a fault
        shutil.copytree(ROOT / name, folder / "code" / name, ignore=shutil.ignore_patterns("__pycache__"))
        (baseline / name).symlink_to(folder / "code" / name)
    (baseline / "harness.py").write_text("MEASURES = True\n")
    (baseline / "program.md").write_text("Be tireless.\n")
    (baseline / ".gitignore").write_text("runs/\nresults.tsv\nmodels\nenvironments\nnightshift\nfault.json\n")
    (baseline / "train.toml").write_bytes(config_of(RATES["baseline"]))
    git(baseline, "add", "--all")
    git(baseline, "commit", "--quiet", "-m", "baseline config")
    git(baseline, "switch", "--quiet", "--create", BRANCH)
    shutil.copytree(baseline, campaign, symlinks=True)
    if finish(start(campaign, FLAGS)) != 0:
        sys.exit(f"the baseline failed: {(campaign.parent / 'stderr').read_text()}")
    moments = {}
    for scene in SCENES:
        root = set_up(scene, folder, folder / "moments" / "checkout")
        counts: Counter[str] = Counter()
        path = folder / "moments.json"

        def count(step: str, number: int, counts: Counter[str] = counts, path: Path = path) -> None:
            counts[step] = number
            path.write_text(json.dumps(counts))

        if finish(start(root, flags_of(scene), strike=count)) not in (0, 1):
            sys.exit(f"scene {scene!r} failed: {(root.parent / 'stderr').read_text()}")
        moments[scene] = sorted(json.loads(path.read_text()).items())
    return moments


def set_up(scene: str, templates: Path, root: Path) -> Path:
    """A fresh checkout at `root` in which the scene can be played."""
    subprocess.run(["chattr", "-R", "-f", "-i", str(root.parent)], capture_output=True, check=False)
    shutil.rmtree(root, ignore_errors=True)
    (root.parent / "temporary").mkdir(parents=True, exist_ok=True)
    kind = scene.partition(",")[0]
    shutil.copytree(templates / ("baseline" if kind in ("baseline", "prime-rl") else "campaign"), root, symlinks=True)
    if kind == "prime-rl":
        (root / "train.toml").write_bytes(config_of(RATES[kind], "max_steps = 4\n"))
        git(root, "commit", "--quiet", "--all", "-m", "a prime-rl config")
    elif kind in ("better", "worse"):
        (root / "train.toml").write_bytes(config_of(RATES[kind]))
        if scene.endswith("committed"):
            git(root, "commit", "--quiet", "--all", "-m", "I commit first")
    return root


def flags_of(scene: str) -> tuple[str, ...]:
    """The flags of the experiment in a scene."""
    if scene == "prime-rl":
        return ("--engine", "prime-rl", "--budget-seconds", "20", "--max-runs", "1")
    return (*FLAGS, "--again") if scene == "again" else FLAGS


def start(
    root: Path,
    flags: Sequence[str],
    *,
    strike: Strike | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    clock: Clock | None = None,
    ports: Callable[[], Any] | None = None,
    name: str = "",
) -> int:
    """Fork a run.py for the checkout; its process id. Its output goes to `stdout` and `stderr` beside the checkout."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        os.chdir(root)
        for number, stream in ((1, "stdout"), (2, "stderr")):
            descriptor = os.open(root.parent / (stream + name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(descriptor, number)
        sys.stdout, sys.stderr = (open(n, "w", closefd=False, buffering=1) for n in (1, 2))  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # a shell's background job ignores some
            signal.signal(number, signal.SIG_DFL)
        _equip(root, deadline_seconds, clock, ports)
        if strike is not None:
            sys.addaudithook(_hook(strike))
        front_door.ROOT = root
        sys.argv = ["run.py", *flags]
        front_door.main(list(flags))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)


def _equip(root: Path, deadline_seconds: float, clock: Clock | None, ports: Callable[[], Any] | None) -> None:
    """In the fork: stand-ins below the engines, and the clock and ports of this fault."""

    class Engine(TrlEngine):
        def open(self, settings: Mapping[str, Any], seed: int, run_dir: Path, deadline: float) -> Any:
            return super().open(settings, seed, run_dir, min(deadline, deadline_seconds))

    class PrimeEngine(PrimeRlEngine):
        def open(self, settings: Mapping[str, Any], seed: int, run_dir: Path, deadline: float) -> Any:
            return super().open(settings, seed, run_dir, min(deadline, deadline_seconds))

    def pick_rules(engine: str | None, gpu_count: int) -> Rules:
        return PRIME_RL_RULES if engine == "prime-rl" else RULES

    def open_engine(rules: Rules, root: Path, *flags: object) -> TrlEngine | PrimeRlEngine:
        if rules.engine == "trl":
            return Engine(replace(rules, startup_seconds=20.0), root, dict(os.environ), worker=SABOTEUR)
        timing = Timing(
            startup_seconds=min(20.0, deadline_seconds / 2), hang_seconds=3.0, grace_seconds=1.0, poll_seconds=0.05
        )
        made = Installation(root.parent / "prime-rl" / "prime-rl", Pins.read(ROOT / "pyproject.toml"))
        return PrimeEngine(rules, root, dict(os.environ), made, gpu_ids=(), timing=timing)

    lab.pick_rules, lab.open_engine = pick_rules, open_engine  # type: ignore[assignment]
    prime_rl.problems = lambda *arguments: []  # type: ignore[assignment]
    if clock is not None:
        lab.datetime = clock.datetime()  # type: ignore[assignment]
        really = time.time
        time.time = lambda: really() + clock.jump_seconds
    if ports is not None:
        prime_rl.launches.free_ports = ports


class Clock:
    """A wall clock of one process that jumps when told."""

    def __init__(self) -> None:
        self.jump_seconds = 0.0

    def datetime(self) -> type[real_datetime]:
        clock = self

        class Jumping(real_datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> real_datetime:  # type: ignore[override]
                return real_datetime.now(tz) + timedelta(seconds=clock.jump_seconds)

        return Jumping


def _hook(strike: Strike) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that counts the file operations of each step and tells each one before it happens."""
    counts: Counter[str] = Counter()
    is_busy = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal is_busy
        if is_busy or event not in OPERATIONS or (event == "open" and not _writes(arguments)):
            return
        step, frame = "front door", sys._getframe(1)
        while frame is not None:
            step = STEPS.get(frame.f_code.co_qualname, step)
            frame = frame.f_back  # type: ignore[assignment]
        counts[step] += 1
        is_busy = True
        try:
            strike(step, counts[step])
        finally:
            is_busy = False

    return hook


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 else 0
    return isinstance(flags, int) and bool(flags & _WRITING)


def refuse(name: str) -> OSError:
    """The error that the kernel gives, by the name of its number."""
    number = getattr(errno, name)
    return OSError(number, os.strerror(number))


def finish(pid: int, within_seconds: float = TAKES_SECONDS) -> int | None:
    """The exit code, negative for a signal; None if it hangs, and is killed. What was stopped is continued."""
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if done and os.WIFSTOPPED(status):
            time.sleep(0.3)
            os.kill(pid, signal.SIGCONT)
        elif done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def seconds_until_gone(root: Path) -> float | None:
    """Until no process of the checkout is left; None if some stay, and are killed."""
    began = time.monotonic()
    while strangers(root):
        if time.monotonic() - began > GONE_SECONDS:
            for process in strangers(root):
                process.kill()
            return None
        time.sleep(0.02)
    return time.monotonic() - began


def run(root: Path, flags: tuple[str, ...]) -> int | None:
    """One undisturbed run.py from start to end."""
    return finish(start(root, flags))


def next_experiment(
    root: Path, scene: str, run: Callable[[Path, tuple[str, ...]], int | None]
) -> tuple[list[str], list[str]]:
    """Run experiments as an agent would until one is measured: (what it was told to do first, problems)."""
    told: list[str] = []
    is_first = not any(r.status in ("keep", "discard") for r in readable(root))
    source = git(root, "show", "HEAD:train.toml").encode() if is_first or scene == "prime-rl" else None
    budget = "20" if scene == "real" else "1"
    flags = ("--engine", "trl", "--budget-seconds", budget, "--max-runs", "1")
    if scene == "prime-rl":
        flags = (*flags_of(scene), "--again")
    for rate in NEXT_RATES:
        (root / "train.toml").write_bytes(source or config_of(rate))
        code = run(root, flags)
        said = (root.parent / "stderr").read_text()
        if code == 0:
            return told, ["Traceback" for _ in range("Traceback" in said)]
        if moved := re.search(r"[Mm]ove (\S+) out of runs/", said):
            told.append("move the damaged record away")
            folder = Path(moved[1])
            folder.rename(root.parent / f"moved-{folder.name}-{random.getrandbits(32):x}")
        elif put_back := re.search(r"Put it back: git show (\S+) > (\S+)", said):
            told.append("put the record's train.toml back")
            (root / put_back[2]).write_bytes(git(root, "show", put_back[1]).encode())
        elif "Commit train.toml, or restore it" in said:
            told.append("restore train.toml")
            source = git(root, "show", "HEAD:train.toml").encode()
        elif "differ from the branch point" in said:  # what was undone came before the branch point
            told.append("restore the harness")
            git(root, "revert", "--no-edit", "HEAD")
        elif "already tried" in said:
            told.append("repeat it with --again")
            flags = (*flags, "--again")
        else:
            return told, [f"the next experiment ended with {code}: {_why(root) or said.splitlines()[-1:]}"]
    return told, [f"no experiment was measured in {len(NEXT_RATES)} tries"]


def _why(root: Path) -> str:
    """The cause that the summary gives."""
    lines = (root.parent / "stdout").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("why:")), "")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What a fault may leave: `gaps` in the numbers, a `foreign` HEAD that somebody else committed to."""

    gaps: bool = False
    foreign: bool = False


def check(root: Path, tolerance: Tolerance) -> list[str]:
    """What is wrong with lock, ledger, results.tsv, branch and leftovers. Empty if nothing is."""
    ledger, found = Ledger(root), []
    if ledger.is_locked():
        found.append("the lock is held")
    records = ledger.records()
    numbers = ledger.numbers()
    if not numbers == [r.number for r in records] == list(range(1, len(numbers) + 1)) and not tolerance.gaps:
        found.append(f"numbers are not 1, 2, 3, ...: {numbers}")
    found += [f"{r.number:04d} is open" for r in records if r.status == "started"]
    found += [f"{r.number:04d} is not settled" for r in records if r.settled is None and r.failure != "interrupted"]
    for r in records:
        if r.status in ("keep", "discard") and not _is_measured(r):
            found.append(f"{r.number:04d} was decided without a whole evaluation")
    header, *rows = ledger.tsv_path.read_text().splitlines()
    if header.split("\t") != list(COLUMNS) or rows != [row(r) for r in records]:
        found.append("results.tsv is not what the records say")
    found += _problems_of_git(root, records, tolerance)
    found += [f"left behind: {p.relative_to(root)}" for p in root.glob("runs/**/.*.tmp")]
    folders = [p for p in root.glob("runs/*/run-*/*") if p.name in HEAVY_NAMES and p.is_dir() and not p.is_symlink()]
    found += [f"left behind: {p.relative_to(root)}" for p in folders]
    return found


def readable(root: Path) -> list[Record]:
    try:
        return Ledger(root).records()
    except Exception:  # a damaged record: whoever runs next is told
        return []


def _is_measured(record: Record) -> bool:
    evaluations = [run.evaluation for run in record.runs if run.evaluation is not None]
    return bool(evaluations) and all(len(e.scores) in (NUM_SELECTION, 16, 1000) for e in evaluations)


def _problems_of_git(root: Path, records: Sequence[Record], tolerance: Tolerance) -> list[str]:
    found, repo, ledger = [], Repo(root), Ledger(root)
    log = git(root, "log", "--format=%H %(trailers:key=Nightshift-Run,valueonly,separator=)")
    trailers = dict(reversed(line.split()) for line in log.splitlines() if len(line.split()) == 2)
    restored = {
        commit
        for commit in trailers.values()
        if "Restore the incumbent" in git(root, "log", "-1", "--format=%s", commit)
    }
    kept = [r for r in records if r.kept_commit]
    for r in kept:
        if repo.config_at(str(r.kept_commit)) != _source(ledger, r):
            found.append(f"commit of {r.number:04d} does not hold what it submitted")
    known = {f"{r.number:04d}" for r in records if r.kept_commit}
    unknown = {number for number, commit in trailers.items() if commit not in restored} - known
    if unknown and not tolerance.gaps:
        found.append(f"commits of experiments that kept nothing: {sorted(unknown)}")
    incumbent = next((r for r in reversed(records) if r.status == "keep"), None)
    is_settled = incumbent is not None and (incumbent.kept_commit or incumbent.parent is None)
    if is_settled and not tolerance.foreign and repo.config_at("HEAD") != _source(ledger, incumbent):
        found.append("HEAD does not hold the incumbent")
    status = [line for line in git(root, "status", "--porcelain").splitlines() if not line.endswith(" train.toml")]
    if status:
        found.append(f"git status: {status}")
    return found


@contextmanager
def listening(port: int) -> Iterator[None]:
    """Somebody else's program holds the port."""
    with socket.create_server(("127.0.0.1", port)):
        yield


def _source(ledger: Ledger, record: Record | None) -> bytes | None:
    """What the experiment submitted; None if somebody took it away."""
    assert record is not None
    path = ledger.run_dir(record.number) / "train.toml"
    return path.read_bytes() if path.is_file() else None


def install_prime_rl(root: Path, fault: str | None, step: int) -> None:
    """The stand-in programs beside the checkout, and what they do wrong."""
    folder = root.parent / "prime-rl"
    shutil.rmtree(folder, ignore_errors=True)
    made = stand_in_prime_rl.installation(folder, PRIME_RL_RULES)
    stand_in_prime_rl.misbehave(made.venv, fault, step)
