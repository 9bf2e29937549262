"""Attempts that have Python run other code than what lies in the agreed files."""

from __future__ import annotations

import importlib.util
import marshal
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


def forge_bytecode(source: Path, evil: str, target: Path | None = None) -> None:
    """Compiled code of `evil` that Python takes for that of `source`: the header holds its time and size."""
    status = source.stat()
    header = importlib.util.MAGIC_NUMBER + b"\0\0\0\0"
    header += int(status.st_mtime).to_bytes(4, "little") + status.st_size.to_bytes(4, "little")
    path = target or _beside(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + marshal.dumps(compile(evil, str(source), "exec")))


def _beside(source: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(source)))


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


for _name, _action, _act in (
    ("forged bytecode", "puts a scoring.*.pyc that is not scoring.py's where Python looks for it",
     lambda c: forge_bytecode(c.root / SCORER, evil_scorer(c), compiled(c, SCORER))),
    ("bytecode of 17 GB", "puts 21 bytes there that announce a tuple of two billion",
     lambda c: huge_bytecode(c.root / SCORER, compiled(c, SCORER))),
    ("sitecustomize in the checkout", "adds code that every Python of this environment runs first",
     lambda c: (c.root / "sitecustomize.py").write_text(_payload(c))),
):  # fmt: skip
    attempt(_name, "refused", action=_action)(_act)


@attempt("LD_LIBRARY_PATH", "refused")
def library_path(c: Checkout) -> Finding:
    """Has the loader look in a folder of its own first, which the campaign's baseline did not."""
    (c.outside / "libbz2.so.1.0").write_bytes(b"\x7fELF")
    return c.hand_in(LD_LIBRARY_PATH=str(c.outside))


attempt("OMP_NUM_THREADS", "refused", action="has the candidate compute with more threads than the baseline did")(
    lambda c: c.hand_in(OMP_NUM_THREADS="64")
)


@attempt("package over a module", "refused")
def shadow_package(c: Checkout) -> None:
    """Adds an untracked decision/ that Python prefers to decision.py."""
    folder = c.root / "nightshift" / "campaign" / "decision"
    folder.mkdir()
    evil = "\nTested.keep = property(lambda self: True)\n"
    (folder / "__init__.py").write_text(folder.with_suffix(".py").read_text() + evil)


def compiled(c: Checkout, name: str) -> Path:
    """Where the harness looks for the bytecode of one of its files."""
    source = c.root / name
    folder = (c.root / ".venv" / "compiled").joinpath(*source.parent.parts[1:])
    folder.mkdir(parents=True, exist_ok=True)
    return folder / Path(importlib.util.cache_from_source(str(source))).name


def huge_bytecode(source: Path, target: Path) -> None:
    """With the header that fits: a tuple ('(') of 2^31 - 1 elements, none of which follows."""
    forge_bytecode(source, "", target)
    target.write_bytes(target.read_bytes()[:16] + b"(" + (2**31 - 1).to_bytes(4, "little"))


attempt("bytecode beside its source, forged", "harmless", action="puts it into __pycache__")(
    lambda c: forge_bytecode(c.root / SCORER, evil_scorer(c))
)
attempt("bytecode beside its source, of 17 GB", "harmless", action="puts it into __pycache__")(
    lambda c: huge_bytecode(c.root / SCORER, _beside(c.root / SCORER))
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


@attempt("PYTHON* variables", "harmless")
def python_variables(c: Checkout) -> Finding:
    """Sets PYTHONPYCACHEPREFIX to a folder with forged bytecode, PYTHONSTARTUP and others."""
    prefix = c.outside / "cache"
    source = c.root / SCORER
    name = Path(importlib.util.cache_from_source(str(source))).name
    forge_bytecode(source, evil_scorer(c), prefix.joinpath(*source.parent.parts[1:], name))
    (c.outside / "start.py").write_text(_payload(c))
    variables = {"PYTHONPYCACHEPREFIX": str(prefix), "PYTHONSTARTUP": str(c.outside / "start.py")}
    return c.hand_in(**variables, PYTHONWARNINGS="error", PYTHONSAFEPATH="")


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
    """Has code run before run.py, in its process, that leaves no PYTHONPATH behind (for the others a nightshift.py)."""
    (c.outside / "sitecustomize.py").write_text(
        f"import os\nos.execv = lambda *_: None\nimport sys; sys.path.insert(0, {str(c.root)!r})\n{_BETTER_RESULTS}"
    )
    return c.hand_in(PYTHONPATH=str(c.outside))


@attempt("changed library", "not defended")
def other_library(c: Checkout) -> None:
    """Adds code to .venv's site-packages, which every process of the harness loads."""
    (c.site_packages / "sitecustomize.py").write_text(_payload(c))
