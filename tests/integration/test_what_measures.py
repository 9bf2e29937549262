"""The rules hash covers what a real run loads from the checkout: head, worker and trainer, whatever starts them."""

import os
import subprocess
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.config.rules import is_covered
from tests.checkouts import make_checkout, python
from tests.conftest import CAMPAIGN
from tests.night_checkout import problems
from tests.rules import ARITHMETIC_TRL, ROOT

# What a run loads and the hash does not cover, beside __init__.py: it moves neither the number nor the verdict.
_EXCEPTIONS = {
    "": ("errors", "files", "startup", "text", "waiting"),
    "agents/": ("direction",),
    "campaign/": ("git", "ledger", "records", "results"),
    "cli/": ("output", "progress", "run", "shell", "status"),
    "config/": ("rules", "rules_toml", "scope"),  # what rules are made of is hashed by value
    "engines/": ("downloads", "machine", "rehearsal", "standstill"),
    "experiment/": ("checkout", "experiment", "health"),
    "report/": ("fields",),
}
EXCEPTIONS = (
    "nightshift/executors/",  # starts the worker, which refuses other rules; watches and ends processes
    *(f"nightshift/{folder}{name}.py" for folder, names in _EXCEPTIONS.items() for name in names),
)
NOT_LOADED = (  # by a run
    "nightshift/campaign/waits.py",
    "nightshift/config/import_config.py",
    "nightshift/engines/doctor.py",
    "nightshift/engines/prime_rl/",  # which measures with its own
    "nightshift/evaluation/template.py",
    "nightshift/experiment/certify.py",
    "nightshift/experiment/prove.py",
)


def test_each_file_that_may_measure_is_hashed_or_named() -> None:
    folders = ("campaign", "config", "engines", "evaluation", "executors", "experiment")
    paths = [path for folder in folders for path in (ROOT / "nightshift" / folder).rglob("*.py")]
    known = (*ARITHMETIC_TRL.measuring, *EXCEPTIONS, *NOT_LOADED)
    names = [path.relative_to(ROOT).as_posix() for path in paths if path.name != "__init__.py"]
    assert [name for name in names if not is_covered(name, known)] == []


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose baseline the real engine has trained."""
    root = tmp_path_factory.mktemp("measured") / "checkout"  # its own: what it imports is compiled there
    make_checkout(root, CAMPAIGN, "max_steps = 1\n[orchestrator]\nbatch_size = 64\ngroup_size = 4\n")
    run(python(root), "run.py", root=root)
    assert [record.status for record in Ledger(root).records()] == ["keep"]
    return root


def run(*command: str, root: Path) -> None:
    command = (*command, "--engine", "trl", "--budget-seconds", "5")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_a_run_loads_is_hashed_or_named(root: Path) -> None:
    compiled = [path.relative_to(root) for path in root.rglob("__pycache__/*.pyc") if ".venv" not in path.parts]
    loaded = {(path.parents[1] / f"{path.name.partition('.')[0]}.py").as_posix() for path in compiled}
    assert {"nightshift/engines/trl/grpo.py", "environments/gsm8k/nightshift_gsm8k/scoring.py"} <= loaded
    files = {name for name in loaded if not name.endswith("__init__.py")}
    unhashed = {name for name in files if not is_covered(name, ARITHMETIC_TRL.measuring)}
    assert sorted(name for name in unhashed if not is_covered(name, EXCEPTIONS)) == []
    assert {path for path in EXCEPTIONS if not any(is_covered(name, (path,)) for name in unhashed)} == set()


@pytest.mark.slow
def test_what_tpe_proposes_in_a_night_is_trained_by_the_real_engine(root: Path) -> None:
    run(f"{root}/.venv/bin/nightshift", "night", "--agent", "tpe", "--experiments", "1", root=root)
    _, record = Ledger(root).records()
    assert (record.failure, record.decided) == (None, 2)
    assert problems(root) == []
    assert record.proposal.description.startswith("tpe: ")
    assert record.diff
