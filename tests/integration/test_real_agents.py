"""Real agent programs from npm in the sandboxes, with a scripted model in a network that holds nothing but 127.0.0.1.

NIGHTSHIFT_REAL_AGENTS may name a folder in which npm has installed them, and which every user may enter. What they
print at their ends is recorded: tests/unit/test_availability.py and tests/contract/test_presets.py read it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkouts import ROOT, small_checkout
from tests.integration.test_in_sandbox import LIBRARIES, why_no_bwrap
from tests.night_checkout import furnish
from tests.scripted_models import URL

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # the first one installs 1.4 GB
KEY = "sk-test-000"
SUBSCRIPTION = {"accessToken": KEY, "refreshToken": KEY, "expiresAt": 4_000_000_000_000, "subscriptionType": "max"}
SUBSCRIPTION |= {"scopes": ["user:inference", "user:profile"]}
OFFLINE = ("unshare", *(() if os.getuid() == 0 else ("-r",)), "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@dataclass(frozen=True)
class Program:
    """A program's package, and what it needs to reach the scripted model: variables, and files below HOME."""

    package: str
    variables: dict[str, str]
    files: dict[str, Any]


PROGRAMS = {
    "claude": Program(
        "@anthropic-ai/claude-code@2.1.197",
        {"ANTHROPIC_BASE_URL": URL},
        {".claude/.credentials.json": {"claudeAiOauth": SUBSCRIPTION}},
    ),
    "codex": Program(
        "@openai/codex@0.169.0",
        {"CODEX_API_KEY": KEY},
        {".codex/config.toml": f'openai_base_url = "{URL}/v1"\nmodel = "gpt-5.1"\n'},
    ),
    "gemini": Program(
        "@google/gemini-cli@0.61.0",
        {"GEMINI_API_KEY": KEY, "GOOGLE_GEMINI_BASE_URL": URL},
        # Otherwise it takes the variable with the address for a login "gateway", which it refuses without a terminal.
        {".gemini/settings.json": {"security": {"auth": {"selectedType": "gemini-api-key"}}}},
    ),
    "opencode": Program(
        "opencode-ai@1.18.33",
        {},
        {
            ".local/share/opencode/auth.json": {"anthropic": {"type": "api", "key": KEY}},
            ".config/opencode/opencode.json": {
                "model": "anthropic/claude-sonnet-4-5",
                "provider": {"anthropic": {"options": {"baseURL": f"{URL}/v1"}}},
            },
        },
    ),
    "pi": Program(
        "@mariozechner/pi-coding-agent@0.73.1",
        {},
        {
            ".pi/agent/auth.json": {"anthropic": {"type": "api_key", "key": KEY}},
            ".pi/agent/settings.json": {"defaultProvider": "anthropic", "defaultModel": "claude-sonnet-4-5"},
            ".pi/agent/models.json": {"providers": {"anthropic": {"baseUrl": URL}}},
        },
    ),
    "qwen": Program(
        "@qwen-code/qwen-code@0.15.10",
        {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_MODEL": "scripted"},
        {".qwen/settings.json": {"security": {"auth": {"selectedType": "openai"}}}},
    ),
}


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    """The folder of the programs' commands."""
    missing = [name for name in ("node", "npm", "unshare", "ip") if shutil.which(name) is None]
    if missing or subprocess.run([*OFFLINE, "true"], capture_output=True).returncode != 0:
        pytest.skip(f"not installed: {', '.join(missing)}" if missing else "no network namespace can be made here")
    if given := os.environ.get("NIGHTSHIFT_REAL_AGENTS"):
        yield Path(given, "node_modules", ".bin")
        return
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is closed to other users
        Path(folder).chmod(0o755)
        packages = [program.package for program in PROGRAMS.values()]
        install = ["npm", "--prefix", folder, "install", "--no-fund", "--no-audit", "--fetch-retries=0", *packages]
        done = subprocess.run(install, capture_output=True, text=True, cwd=folder)
        if done.returncode != 0:
            pytest.skip(f"npm cannot install them: {done.stderr.strip().partition(chr(10))[0]}")
        yield Path(folder, "node_modules", ".bin")


@dataclass
class Setting:
    """A user with one of the programs, a checkout, and the scripted model."""

    folder: Path
    name: str
    environ: dict[str, str]

    @property
    def root(self) -> Path:
        return self.folder / "checkout"

    def offline(self, script: str, *words: str) -> list[str]:
        """The command line of a script in tests/, beside the scripted model and without another network."""
        model = [sys.executable, str(ROOT / "tests" / "scripted_models.py"), str(self.folder / "model"), "--"]
        return [*OFFLINE, *model, sys.executable, "-P", str(ROOT / "tests" / script), *words]

    def run(self, sandbox: str, **asked: object) -> dict[str, Any]:
        """One session of the agent as tests/in_sandbox.py starts it."""
        given = {"agent": self.name, "sandbox": sandbox, "root": str(self.root), "libraries": LIBRARIES}
        given |= {"temporary": str(self.folder / "temporary"), "environ": self.environ, **asked}
        words = self.offline("in_sandbox.py", json.dumps(given))
        done = subprocess.run(words, env=self.environ, cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def requests(self) -> list[dict[str, Any]]:
        """What the model was asked, and what it answered."""
        lines = (self.folder / "model" / "requests.jsonl").read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]


@pytest.fixture(params=PROGRAMS)
def setting(request: pytest.FixtureRequest, programs: Path, sandbox: str) -> Iterator[Setting]:
    if (request.param, sandbox) == ("qwen", "user"):
        pytest.skip("Qwen Code asks the system for the name of its user, and a uid of its own has none")
    if not (programs / request.param).exists():
        pytest.skip(f"{request.param} is not in NIGHTSHIFT_REAL_AGENTS")
    program = PROGRAMS[request.param]
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for made in ("home", "model"):
            (folder / made).mkdir(mode=0o700 if made == "home" else 0o755)
        for file, text in program.files.items():
            (folder / "home" / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / "home" / file).write_text(text if isinstance(text, str) else json.dumps(text))
        furnish(small_checkout(folder))
        (folder / "model" / "requests.jsonl").touch()
        path = f"{programs}:/usr/local/bin:/usr/bin:/bin"
        yield Setting(
            folder, request.param, {"PATH": path, "HOME": f"{folder}/home", "TERM": "dumb", **program.variables}
        )


SANDBOXES = [
    pytest.param("bwrap", marks=pytest.mark.skipif(why_no_bwrap() is not None, reason=str(why_no_bwrap()))),
    pytest.param("user", marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")),
]


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_a_real_program_reads_and_edits_train_toml_and_writes_its_hypothesis(setting: Setting, sandbox: str) -> None:
    prompt = "Change train.toml in this folder: raise trainer.optim.lr, then write hypothesis.txt, then end.\n"
    told = setting.run(sandbox, source="[trainer.optim]\nlr = 3e-6\n", prompt=prompt)
    assert (told["cause"], told["notes"], told["sandbox"]) == (None, [], sandbox), told
    assert told["config"] == "[trainer.optim]\nlr = 4.5e-06\n"
    assert told["answer"].startswith("HYPOTHESIS: a larger learning rate"), told
    asked = [line["answer"].get("tool") for line in setting.requests() if prompt.strip() in line["prompt"]]
    assert [tool for tool in asked if tool] == ["read", "edit", "write"]
