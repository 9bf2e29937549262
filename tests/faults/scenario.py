"""A throw-away checkout in mid-campaign in which a scenario is played, and what an agent does there afterwards."""

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from nightshift.campaign.ledger import Ledger
from tests import checkouts
from tests.checkouts import git
from tests.faults import head
from tests.faults.matrix import BRANCH, SCENARIOS, Moments
from tests.faults.plan import RULES, Plan
from tests.faults.stand_in_trainer import NUM_VALIDATION
from tests.stand_in_trainer import is_right, right_of
from tests.waiting import wait_for

FLAGS = ("--engine", "trl", "--budget-seconds", "1")
RATES = {"baseline": 2e-6, "better": 1.2e-5, "worse": 1e-3}
NEXT_RATES = (7e-6, 8e-6, 9e-6, 1.1e-5)  # of the experiments after the fault
IGNORED = ("runs/", "results.tsv", "models", "environments", "nightshift", "fault.json")


def config_of(rate: float) -> bytes:
    orchestrator = "[orchestrator]\nbatch_size = 256\ngroup_size = 4\n"
    return f"max_steps = 3\n{orchestrator}[trainer.optim]\nlr = {rate!r}\n".encode()


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
    if head.complete(campaign, FLAGS) != 0:
        sys.exit(f"the baseline failed: {(folder / 'stderr').read_text()}")
    return {scenario: _moments(scenario, folder) for scenario in SCENARIOS}


def _moments(scenario: str, folder: Path) -> list[tuple[str, int]]:
    """The file operations of a scenario that nothing disturbs."""
    root = set_up(scenario, folder, folder / "moments" / "checkout")
    path = folder / "moments.tsv"
    path.unlink(missing_ok=True)
    if head.complete(root, flags_of(scenario), Plan(told=str(path))) != 0:
        sys.exit(f"scenario {scenario!r} failed: {(root.parent / 'stderr').read_text()}")
    last: dict[str, int] = {}
    for step, number in (line.split("\t") for line in path.read_text().splitlines()):
        last[step] = max(last.get(step, 0), int(number))
    return sorted(last.items())


def set_up(scenario: str, templates: Path, root: Path) -> Path:
    """A fresh checkout at `root` in which the scenario can be played."""
    shutil.rmtree(root, ignore_errors=True)
    (root.parent / "temporary").mkdir(parents=True, exist_ok=True)
    kind = scenario.partition(",")[0]
    shutil.copytree(templates / ("baseline" if kind == "baseline" else "campaign"), root, symlinks=True)
    if kind in RATES:
        (root / "train.toml").write_bytes(config_of(RATES[kind]))
    if scenario.endswith("committed"):
        git(root, "commit", "--quiet", "--all", "-m", "I commit first")
    return root


def flags_of(scenario: str) -> tuple[str, ...]:
    return (*FLAGS, "--again") if scenario == "again" else FLAGS


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
    is_first = not any(r.is_keep for r in Ledger(root).records())
    source = git(root, "show", "HEAD:train.toml").encode() if is_first else None
    flags = flags_of("baseline" if scenario == "again" else scenario)
    for rate in NEXT_RATES:
        (root / "train.toml").write_bytes(source or config_of(rate))
        code = head.complete(root, flags)
        said = (root.parent / "stderr").read_text()
        if code == 0:
            return ["Traceback" for _ in range("Traceback" in said)]
        if "Commit train.toml, or restore it" in said:
            source = git(root, "show", "HEAD:train.toml").encode()
        elif "already tried" in said:
            flags = (*flags, "--again")
        else:
            return [f"the next experiment ended with {code}: {_why(root) or said.splitlines()[-1:]}"]
    return [f"no experiment was measured in {len(NEXT_RATES)} tries"]


def _why(root: Path) -> str:
    lines = (root.parent / "stdout").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("why:")), "")


def wrong_scores(root: Path) -> list[str]:
    """Runs whose scores are not those that the stand-in trainer gives to what their records say was trained."""
    found = []
    for record in (record for record in Ledger(root).records() if record.rules_name == RULES.name):
        if record.result is not None and record.evaluation is not None:
            right = right_of(record.effective["optimizer"]["lr"], record.result.seed)
            if record.evaluation.example_scores != tuple(float(is_right(question, right)) for question in _questions()):
                found.append(f"{record.number:04d} has a wrong score")
    return found


@cache
def _questions() -> list[str]:
    """Return the validation split's questions, from another process: forks of this one import another copy."""
    code = "import json; from nightshift_arithmetic.data import load; "
    code += f"print(json.dumps([example.question for example in load('validation', {NUM_VALIDATION})]))"
    folder = checkouts.ROOT / "environments" / "arithmetic"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    questions: list[str] = json.loads(done.stdout)
    return questions
