"""Claude Code from npm in the sandboxes, with a scripted model in a network that holds nothing but 127.0.0.1.

NIGHTSHIFT_REAL_AGENTS may name a folder in which npm has installed it, and which every user may enter. What it and
others print at their ends is recorded: tests/unit/test_availability.py and tests/contract/test_presets.py read it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkouts import ROOT, small_checkout
from tests.integration.test_in_sandbox import LIBRARIES, why_no_bwrap
from tests.night_checkout import furnish
from tests.scripted_models import URL

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
PACKAGE = "@anthropic-ai/claude-code@2.1.197"
KEY = "sk-test-000"
SUBSCRIPTION = {"accessToken": KEY, "refreshToken": KEY, "expiresAt": 4_000_000_000_000, "subscriptionType": "max"}
SUBSCRIPTION |= {"scopes": ["user:inference", "user:profile"]}
OFFLINE = ("unshare", *(() if os.getuid() == 0 else ("-r",)), "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    """The folder of the program's command."""
    missing = [name for name in ("node", "npm", "unshare", "ip") if shutil.which(name) is None]
    if missing or subprocess.run([*OFFLINE, "true"], capture_output=True).returncode != 0:
        pytest.skip(f"not installed: {', '.join(missing)}" if missing else "no network namespace can be made here")
    if given := os.environ.get("NIGHTSHIFT_REAL_AGENTS"):
        yield Path(given, "node_modules", ".bin")
        return
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is closed to other users
        Path(folder).chmod(0o755)
        install = ["npm", "--prefix", folder, "install", "--no-fund", "--no-audit", "--fetch-retries=0", PACKAGE]
        done = subprocess.run(install, capture_output=True, text=True, cwd=folder)
        if done.returncode != 0:
            pytest.skip(f"npm cannot install it: {done.stderr.strip().partition(chr(10))[0]}")
        yield Path(folder, "node_modules", ".bin")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A user with the program's login, a checkout and a folder for the scripted model."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "model").mkdir()
        (folder / "home").mkdir(mode=0o700)
        (folder / "home" / ".claude").mkdir()
        (folder / "home" / ".claude" / ".credentials.json").write_text(json.dumps({"claudeAiOauth": SUBSCRIPTION}))
        furnish(small_checkout(folder))
        yield folder


SANDBOXES = [
    pytest.param("bwrap", marks=pytest.mark.skipif(why_no_bwrap() is not None, reason=str(why_no_bwrap()))),
    pytest.param("user", marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")),
]


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_a_real_program_reads_and_edits_train_toml_and_writes_its_hypothesis(programs, folder, sandbox):
    prompt = "Change train.toml in this folder: raise trainer.optim.lr, then write hypothesis.txt, then end.\n"
    environ = {"PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin", "HOME": f"{folder}/home", "TERM": "dumb"}
    environ["ANTHROPIC_BASE_URL"] = URL
    given = {"agent": "claude", "sandbox": sandbox, "root": str(folder / "checkout"), "libraries": LIBRARIES}
    given |= {"temporary": str(folder / "temporary"), "environ": environ, "prompt": prompt}
    given |= {"source": "[trainer.optim]\nlr = 3e-6\n"}
    model = [sys.executable, str(ROOT / "tests" / "scripted_models.py"), str(folder / "model"), "--"]
    words = [*OFFLINE, *model, sys.executable, "-P", str(ROOT / "tests" / "in_sandbox.py"), json.dumps(given)]
    done = subprocess.run(words, env=environ, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["cause"], answer["notes"], answer["sandbox"]) == (None, [], sandbox), answer
    assert answer["config"] == "[trainer.optim]\nlr = 4.5e-06\n"
    assert answer["answer"].startswith("HYPOTHESIS: a larger learning rate"), answer
    assert (folder / "model" / "tools").read_text().split() == ["Read", "Edit", "Write"]
