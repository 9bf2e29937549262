"""Fixtures that several test files share: a throw-away git checkout on a campaign branch."""

import os
import signal
import sys
from functools import cache, partial
from pathlib import Path

import hypothesis
import psutil
import pytest
from nightshift_arithmetic import data as arithmetic
from xdist.scheduler import LoadScopeScheduling

from nightshift.executors.gpus import list_gpus
from nightshift.executors.process import WATCHDOG, is_alive
from tests.checkouts import CAMPAIGN, ROOT, git, small_checkout  # noqa: F401  (tests take them from here)
from tests.waiting import Clock

slow = partial(pytest.param, marks=pytest.mark.slow)  # one case of a parametrized test
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not list_gpus(), reason="no NVIDIA GPU")]
GROUPS = {
    "trained": ("tests/integration/test_what_measures.py",),  # in this order: a night loads more than a run
    "torch": ("tests/integration/test_trl_", "tests/integration/test_prime_rl_reader.py"),
    "browser": ("tests/browser/",),
    "campaigns": (
        "tests/unit/test_brief.py::test_the_logs_are",
        "tests/unit/test_brief.py::test_it_is_bounded",
        "tests/unit/test_json.py",
        "tests/unit/test_exports.py",
    ),
    "sources": ("tests/unit/test_architecture.py",),
    "slurm": ("tests/integration/test_slurm.py",),
    "verifiers": (
        "tests/integration/test_tasksets.py",
        "tests/integration/test_somebodys_taskset.py",
        "tests/integration/test_prime_rl_validation.py::test_the_env",
    ),
}
# Container images set it. Then every process that a test starts would compile the libraries again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Workers share the cores: threads of torch and of BLAS would wait for each other, three times as long for tiny models.
os.environ["OMP_NUM_THREADS"] = "1"
arithmetic.load = cache(arithmetic.load)  # drawing 4,000 examples takes a second


class Grouped(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out test by test, but those of a group to one process, which loads once what takes seconds to load."""

    def _split_scope(self, nodeid: str) -> str:
        return next((group for group, files in GROUPS.items() if nodeid.startswith(files)), nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Grouped:
    """Instead of --dist; its loadgroup does nothing under this pytest."""
    return Grouped(config, log)


def pytest_sessionstart() -> None:
    """Children inherit what is ignored, and a job in the background of a shell, or under nohup, ignores some.
    Hypothesis by itself gives each example 200 ms by the clock on the wall."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    hypothesis.settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any machine")


def living_children() -> list[psutil.Process]:
    """Descendants of pytest that still run. Zombies do not: pytest is a child subreaper after its first
    ProcessGroup, and nobody reaps what harnesses killed by other tests left to it. Nor do the watchdogs of
    those, which leave by themselves."""
    return [p for p in psutil.Process().children(recursive=True) if is_alive(p) and not _watches_another(p)]


def _watches_another(process: psutil.Process) -> bool:
    try:
        *_, script, harness = ["", "", *process.cmdline()]
    except psutil.Error:
        return False
    return script == WATCHDOG[1] and harness != str(os.getpid())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return small_checkout(tmp_path)
