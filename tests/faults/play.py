"""The matrix of faults (which process or file x which moment x which failure, drawn by number), and one fault played:
struck in a fresh checkout in mid-campaign, and followed by the next experiment, as an agent would start it.

A moment is a file operation of run.py (`run.py 3`) or of its worker (`worker 2`), or an event of the trainer
(`step 2`). How many file operations there are is counted in experiments without a fault.
"""

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nightshift.campaign.ledger import Ledger
from nightshift.evaluation import environment
from tests import checkouts, integrity
from tests.checkouts import git
from tests.faults.process import Fault, Plan
from tests.rules import ARITHMETIC_TRL
from tests.stand_in_trainer import is_right, right_of
from tests.stand_ins import small
from tests.waiting import wait_for

Moments = Mapping[str, dict[str, int]]  # by scenario, how many file operations run.py and its worker have

BRANCH = "autoresearch/faults"

# What is tried in the checkout: a baseline; a change that is kept, one that is discarded; the incumbent again.
SCENARIOS = ("baseline", "better", "worse", "again")
EVENTS = ("start", "ready", "step 1", "step 3", "trained", "weights", "completed")
DEADLY = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGSEGV", "SIGABRT", "SIGQUIT")
POLITE = ("SIGTERM", "SIGINT", "SIGHUP")
OS_ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS", "EMFILE", "ENOMEM")
STRIKES = (  # the victim, and the failures of which one is drawn
    ("run.py", DEADLY),
    ("run.py", POLITE),
    ("a file operation", OS_ERRORS),
    ("worker", (*DEADLY, "SIGTERM", "SIGPIPE")),
    ("trainer", (*DEADLY, "SIGTERM", "SIGPIPE")),
    ("trainer", ("exit 0", "exit 1", "exit 3", "exit 127", "exit 255")),
    ("watchdog", ("SIGKILL", "SIGTERM")),
    ("watchdog and run.py", ("SIGKILL",)),
    ("watchdog and worker", ("SIGKILL",)),
    ("run.py and worker", ("SIGKILL",)),
)

RULES = replace(small(ARITHMETIC_TRL, 100), startup_seconds=60.0)
FLAGS = ("--engine", "trl", "--budget-seconds", "1")
RATES = {"baseline": 2e-6, "better": 1.2e-5, "worse": 1e-3}
NEXT_RATES = (7e-6, 8e-6, 9e-6, 1.1e-5)  # of the experiments after the fault
IGNORED = ("runs/", "results.tsv", "models", "environments", "nightshift")


def draw(number: int, moments: Moments) -> Fault:
    """The fault of that number; the same for the same moments."""
    rng = random.Random(number)
    scenario = rng.choice(SCENARIOS)
    victim, failures = STRIKES[number % len(STRIKES)]
    process = victim if victim in ("run.py", "worker") else rng.choice(("run.py", "worker"))
    moment = f"{process} {rng.randint(1, moments[scenario][process])}"
    if victim.startswith(("trainer", "watchdog")) or (victim != "a file operation" and rng.random() < 0.3):
        moment = rng.choice(EVENTS)
    return Fault(number, scenario, victim, moment, rng.choice(failures))


def config_of(rate: float) -> bytes:
    orchestrator = "[orchestrator]\nbatch_size = 256\ngroup_size = 4\n"
    return f"max_steps = 3\n{orchestrator}[trainer.optim]\nlr = {rate!r}\n".encode()


def complete(root: Path, flags: tuple[str, ...], plan: Plan | None = None) -> int:
    """Run an experiment. Return the exit code, negative for a signal. Its output goes to `stdout` and `stderr` beside
    the checkout."""
    command = [sys.executable, *(plan or Plan()).command("run.py"), str(root), *flags]
    with (root.parent / "stdout").open("w") as stdout, (root.parent / "stderr").open("w") as stderr:
        done = subprocess.run(command, cwd=root, stdout=stdout, stderr=stderr, start_new_session=True, check=False)
    return done.returncode


def stderr_of(root: Path) -> str:
    return (root.parent / "stderr").read_text()


def make_templates(folder: Path) -> Moments:
    """`folder`/baseline and `folder`/campaign, to be copied for each fault; and the moments of every scenario."""
    baseline, campaign = folder / "baseline", folder / "campaign"
    baseline.mkdir(parents=True)
    for name in ("models", "environments", "nightshift"):  # copies: an edit during the hours is not a fault
        shutil.copytree(checkouts.ROOT / name, folder / "code" / name, ignore=shutil.ignore_patterns("__pycache__"))
        (baseline / name).symlink_to(folder / "code" / name)
    (baseline / "prepare.py").write_text("PREPARES = True\n")
    (baseline / "rules.toml").write_text("environments = []\n")
    (baseline / "program.md").write_text("Be tireless.\n")
    (baseline / ".gitignore").write_text("\n".join(IGNORED) + "\n")
    (baseline / "train.toml").write_bytes(config_of(RATES["baseline"]))
    checkouts.commit_all(baseline, BRANCH)
    shutil.copytree(baseline, campaign, symlinks=True)
    if complete(campaign, FLAGS) != 0:
        sys.exit(f"the baseline failed: {stderr_of(campaign)}")
    moments = {}
    for scenario in SCENARIOS:
        root, counts = set_up(scenario, folder, folder / "moments" / "checkout"), folder / "counts" / scenario
        counts.mkdir(parents=True)
        if complete(root, flags_of(scenario), Plan(counts=str(counts))) != 0:
            sys.exit(f"scenario {scenario!r} failed: {stderr_of(root)}")
        moments[scenario] = {path.name: path.stat().st_size for path in counts.iterdir()}
    return moments


def set_up(scenario: str, templates: Path, root: Path) -> Path:
    """A fresh checkout at `root` in which the scenario can be played."""
    shutil.rmtree(root.parent, ignore_errors=True)
    shutil.copytree(templates / ("baseline" if scenario == "baseline" else "campaign"), root, symlinks=True)
    if scenario in RATES:
        (root / "train.toml").write_bytes(config_of(RATES[scenario]))
    return root


def flags_of(scenario: str) -> tuple[str, ...]:
    return (*FLAGS, "--again") if scenario == "again" else FLAGS


def play(fault: Fault, slot: Path, templates: Path) -> tuple[bool, list[str]]:
    """Play one fault, from a fresh checkout to the next experiment. Return whether its moment came, and the problems
    that it left."""
    root = set_up(fault.scenario, templates, slot / "checkout")
    code = complete(root, flags_of(fault.scenario), Plan(fault, str(slot / "struck")))
    is_struck = (slot / "struck").exists()
    all_gone = wait_until_gone(root)
    said = stderr_of(root)
    found = [] if code in _expected(fault, is_struck) else [f"exit code {code}"]
    found += ["a traceback"] if "\nTraceback" in f"\n{said}" else []  # not in the indented last lines of a log
    found += [f"processes were left: {fault.failure}"] if not all_gone else []
    found += next_experiment(root, fault.scenario) + integrity.problems(root) + wrong_scores(root)
    return is_struck, found + said.splitlines()[-1:] if found else []


def _expected(fault: Fault, is_struck: bool) -> set[int]:
    """Exit codes that a fault may lead to: 0 to 2 as documented, 130 if asked to stop, minus the signal if killed."""
    if not is_struck or "run.py" not in fault.victim:
        return {0, 1, 2}
    number = -int(signal.Signals[fault.failure])
    # The signal itself where nothing is under way: in the last line of the summary.
    return {130, number} if fault.failure in POLITE else {number}


def wait_until_gone(root: Path) -> bool:
    """Wait until no process of the checkout is left. False if some stay; they are killed."""
    try:
        return wait_for(lambda: not checkouts.leftovers(root.parent))
    except AssertionError:
        for process in checkouts.leftovers(root.parent):
            process.kill()
        return False


def next_experiment(root: Path, scenario: str) -> list[str]:
    """Run experiments as an agent would, who does as the messages say, until one is measured. Return problems."""
    is_first = not any(record.is_keep for record in Ledger(root).records())
    source = git(root, "show", "HEAD:train.toml").encode() if is_first else None
    flags = flags_of("baseline" if scenario == "again" else scenario)
    for rate in NEXT_RATES:
        (root / "train.toml").write_bytes(source or config_of(rate))
        code = complete(root, flags)
        said = stderr_of(root)
        if code == 0:
            return ["Traceback"] if "Traceback" in said else []
        if "already tried" in said:
            flags = (*flags, "--again")
        else:
            why = [line for line in (root.parent / "stdout").read_text().splitlines() if line.startswith("why:")]
            return [f"the next experiment ended with {code}: {why or said.splitlines()[-1:]}"]
    return [f"no experiment was measured in {len(NEXT_RATES)} tries"]


def wrong_scores(root: Path) -> list[str]:
    """Runs whose scores are not those that the stand-in trainer gives to what their records say was trained."""
    (arithmetic,) = environment.load(checkouts.ROOT, RULES.environments)
    questions = [example.question for example in arithmetic.examples("validation")]
    found = []
    for record in (record for record in Ledger(root).records() if record.rules_name == RULES.name):
        if record.result is not None and record.evaluation is not None:
            right = right_of(record.effective["optimizer"]["lr"], record.result.seed)
            if record.evaluation.example_scores != tuple(float(is_right(question, right)) for question in questions):
                found.append(f"{record.number:04d} has a wrong score")
    return found
