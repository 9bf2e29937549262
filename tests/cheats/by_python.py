"""Attempts that have Python run other code than what lies in the agreed files."""

import shutil
import sys
from pathlib import Path

from tests import checkouts
from tests.cheats.attempt import Collection
from tests.cheats.checkout import BUDGET_SECONDS, CANDIDATE, EVIL_SCORER, SCORER, Checkout, Finding

attempt = Collection("checkout", "what Python imports")
# Python in the head's own process: the worker measures, and something else is taken in.
_BETTER_RESULTS = """
from dataclasses import replace
from nightshift.campaign.records import packed
from nightshift.executors.local import LocalExecutor
honest = LocalExecutor.result
def result(executor, folder):
    run = honest(executor, folder)
    scores = packed([1.0] * len(run.evaluation.example_scores))
    return replace(run, evaluation=replace(run.evaluation, scores=scores, eval_score=1.0))
LocalExecutor.result = result
"""


def evil_scorer(c: Checkout) -> str:
    return (c.root / SCORER).read_text() + EVIL_SCORER


def _payload(c: Checkout) -> str:
    """Code that tells that it ran, and makes every answer right in the process that trains."""
    return (
        f"import sys; open({str(c.marker)!r}, 'a').write(' '.join(sys.orig_argv) + '\\n'); "
        "import math; math.exp = lambda x: 2.0\n"  # the stand-in's score of any learning rate
    )


def _package(folder: Path, c: Checkout, name: str = "nightshift_gsm8k") -> Path:
    """A copy of an environment package in another folder, with a scorer that likes everything."""
    shutil.copytree(c.root / "environments" / name.removeprefix("nightshift_") / name, folder / name)
    (folder / name / "scoring.py").write_text(evil_scorer(c))
    return folder


@attempt("LD_LIBRARY_PATH", "refused")
def library_path(c: Checkout) -> Finding:
    """Has the loader look in a folder of its own first, which the campaign's baseline did not."""
    (c.outside / "libbz2.so.1.0").write_bytes(b"\x7fELF")
    return c.hand_in(LD_LIBRARY_PATH=str(c.outside))


attempt("OMP_NUM_THREADS", "refused", action="has the candidate compute with more threads than the baseline did")(
    lambda c: c.hand_in(OMP_NUM_THREADS="64")
)


@attempt("usercustomize in the home folder", "harmless")
def home_usercustomize(c: Checkout) -> None:
    """Adds code to the user's site-packages, under every name that Python looks for there, and as torch.py."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = c.home / ".local" / "lib" / version / "site-packages"
    folder.mkdir(parents=True)
    for name in ("usercustomize.py", "sitecustomize.py", "torch.py", "mine.pth"):
        (folder / name).write_text(_payload(c))


@attempt("PYTHONPATH: environment package", "harmless")
def python_path_package(c: Checkout) -> Finding:
    """Leads the import of an environment package elsewhere by a variable."""
    return c.hand_in(PYTHONPATH=str(_package(c.outside, c)))


@attempt("PYTHONPATH: harness and libraries", "harmless")
def python_path_harness(c: Checkout) -> Finding:
    """Brings a nightshift, click and torch of its own."""
    shutil.copytree(c.root / "nightshift", c.outside / "nightshift")
    for name in ("nightshift/__init__.py", "torch.py", "click.py"):
        (c.outside / name).write_text(_payload(c))
    return c.hand_in(PYTHONPATH=str(c.outside))


@attempt("a program of its own", "not defended")
def own_program(c: Checkout) -> Finding:
    """Imports the harness, replaces what takes in the worker's result, and runs run.py's own steps."""
    code = (
        f"import sys; sys.path.insert(0, {str(c.root)!r})\n{_BETTER_RESULTS}"
        f"import run; run.main(['--engine=trl', '--budget-seconds={BUDGET_SECONDS}'])\n"
    )
    c.submit(CANDIDATE)
    return c.judge(c.call([checkouts.python(c.root), "-c", code], {}))


@attempt("PYTHONPATH: sitecustomize", "not defended")
def python_path_sitecustomize(c: Checkout) -> Finding:
    """Has code run before run.py, in its process."""
    (c.outside / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(c.root)!r})\n{_BETTER_RESULTS}")
    return c.hand_in(PYTHONPATH=str(c.outside))


@attempt("changed library", "not defended")
def other_library(c: Checkout) -> None:
    """Adds code to .venv's site-packages, which every process of the harness loads."""
    (c.site_packages / "sitecustomize.py").write_text(_payload(c))
