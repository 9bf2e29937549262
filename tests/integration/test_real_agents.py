"""Real agent programs from npm in the sandboxes, with a scripted model in a network that holds nothing but 127.0.0.1.

NIGHTSHIFT_REAL_AGENTS may name a folder in which npm has installed them, and which every user may enter. The nights
have the stand-in trainer; programs, sandboxes and night are real.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from nightshift.campaign.records import Record
from nightshift.night.state import FILL
from tests.checkouts import ROOT, small_checkout
from tests.integration.test_in_sandbox import LIBRARIES, why_no_bwrap
from tests.night_checkout import furnish, leftovers, nightshift, problems, records, state
from tests.notify_commands import command, heard
from tests.scripted_models import URL
from tests.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # the first one installs 1.4 GB
T = TypeVar("T")
MOST_SECONDS = 480.0  # until a night says what it is waited for
AGENT_SECONDS = {"opencode": 120.0}  # of one answer; 40 for the others: opencode starts slowly under load
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

    def let(self, case: str) -> None:
        (self.folder / "model" / "case").write_text(case)

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

    @contextmanager
    def night(self, sandbox: str, **asked: object) -> Iterator[Night]:
        """A night of this program, as tests/stand_in_night.py starts it."""
        asked = {"agent": self.name, "sandbox": sandbox, "engine": "trl", "budget_seconds": 4.0, **asked}
        words = self.offline("stand_in_night.py", str(self.root), json.dumps(asked))
        environ = {**self.environ, "TMPDIR": str(self.folder / "temporary")}
        with (self.folder / "stdout").open("w") as stdout, (self.folder / "stderr").open("w") as stderr:
            given = {"env": environ, "stdout": stdout, "stderr": stderr}
            process = subprocess.Popen(words, cwd=self.root, start_new_session=True, **given)  # type: ignore[call-overload]
        try:
            yield Night(self, process)
        finally:
            with suppress(ProcessLookupError):  # the model, and the night beside it
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            wait_for(lambda: not leftovers(self.root), "the end of the night's processes")

    def requests(self) -> list[dict[str, Any]]:
        """What the model was asked, and what it answered."""
        lines = (self.folder / "model" / "requests.jsonl").read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def answers(self) -> list[Any]:
        return [line["answer"] for line in self.requests()]


@dataclass
class Night:
    """A night under way, and what it prints."""

    setting: Setting
    process: subprocess.Popen[bytes]
    num_read: int = 0  # lines of stderr

    def wait_for(self, condition: Callable[[], T], what: str) -> T:
        began = time.monotonic()
        while not (value := condition()):
            text = (self.setting.folder / "stderr").read_text()
            assert self.process.poll() is None, text
            assert time.monotonic() - began < MOST_SECONDS, f"{what} did not come:\n{text}"
            time.sleep(0.2)
        return value

    def until(self, pattern: str) -> str:
        """The next line of stderr that the pattern finds."""
        return self.wait_for(lambda: self._find(pattern), f"the line {pattern!r}")

    def _find(self, pattern: str) -> str:
        lines = (self.setting.folder / "stderr").read_text().split("\n")[:-1]
        for number, line in enumerate(lines[self.num_read :], self.num_read):
            if re.search(pattern, line):
                self.num_read = number + 1
                return line
        return ""

    def refusals(self) -> list[str]:
        path = self.setting.root / "runs" / "night.json"
        return json.loads(path.read_text())["refusals"] if path.exists() else []

    def summary(self) -> str:
        path = self.setting.root / "runs" / "night.txt"
        return path.read_text() if path.exists() else ""

    def end(self) -> tuple[int, str, str]:
        code = self.process.wait(MOST_SECONDS)
        return code, (self.setting.folder / "stdout").read_text(), (self.setting.folder / "stderr").read_text()


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
        (folder / "model" / "case").write_text("ok")
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


NIGHTS = pytest.mark.parametrize("setting", ["claude", "codex", "gemini", "opencode"], indirect=True)
HYPOTHESIS = "a larger learning rate learns more in the same steps"
DIRECTION = "only trainer.optim.lr"
SILENT = "network: the model did not answer before the time limit"
# By the case of the model: what a night says of it after the program's name, or of a program that says otherwise.
# opencode sleeps until a limit ends, and tries an overloaded model again for longer than it may, without a word.
SAID = {
    "usage": {
        "claude": r"usage limit: You've hit your session limit · resets \d+:\d\d[ap]m \(UTC\)",
        "codex": r"usage limit: You.ve hit your usage limit\. .*try again at \d+:\d\d [AP]M",
        "gemini": r"usage limit: .*You have exhausted your capacity on this model\. Your quota will reset after 2h0m0s",
        "opencode": SILENT,
    },
    "auth": {"": "login: .*(?i:key|log in|login|unauthorized)"},
    "overloaded": {"": "overloaded: ", "opencode": SILENT},
    "hang": {"": SILENT, "codex": "network: "},  # it says that it found no web socket
    "context": {"": "(?:too long|context window|maximum allowed)"},
}
# Three answers of 2,000 tokens in and 40 out, and one sentence; Gemini CLI first asks which model to use.
COSTS = {
    "claude": (8000, 160, True),
    "codex": (8000, 160, False),
    "gemini": (10_000, 200, False),
    "opencode": (None, None, False),
}
CUT_OFF = "usage 2 7200"  # train.toml is changed by then
CASES = {
    "bwrap": ["usage 0 7200", "context", CUT_OFF, "ok"],
    "user": ["auth", "overloaded", "hang", "ok"],
}


def closed(root: Path, proposer: str) -> list[Record]:
    """The experiments of a proposer that have ended."""
    ours = [record for record in records(root) if record.proposal.proposer == proposer]
    return [record for record in ours if record.decided is not None]


@NIGHTS
@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_a_night_goes_on_whatever_happens_to_a_real_program(setting: Setting, sandbox: str, folder: Path) -> None:
    """Two experiments of the agent, and before them what a model's provider may answer."""
    name, root, meanings = setting.name, setting.root, set[str]()
    asked = {
        "direction": DIRECTION,
        "fill": True,
        "experiments": 100,
        "max_cost": 100.0,
        "notify": command(folder, "works"),
    }
    seconds = AGENT_SECONDS.get(name, 40.0)
    asked |= {"waits": 4.0, "pauses": [3.0] * 3, "question": 40.0, "agent_timeout_seconds": seconds}
    if sandbox == "user":
        setting.let("auth")
        with setting.night(sandbox, **asked) as night:
            code, stdout, stderr = night.end()
        *_, line = stderr.splitlines()
        assert (code, stdout) == (2, "")
        assert re.match(f"{name}: {SAID['auth']['']}", line), line
        assert line.endswith(". Log in with the program itself, then start the night.")
        assert not (root / "runs" / "night.json").exists()
    setting.let("ok" if sandbox == "user" else CASES[sandbox][0])  # a limit before the night is no reason not to begin
    with setting.night(sandbox, **asked) as night:
        night.until(
            rf"^{name} answers \(sandbox: {sandbox}\)$" if sandbox == "user" else f"^{name}: .*; asked again at"
        )
        for case in CASES[sandbox]:
            if case == "ok":
                setting.let(case)
                night.wait_for(lambda: len(closed(root, name)) >= 2, "two experiments of the agent")
                continue
            kind, num_asked, num_fills = case.split()[0], len(setting.requests()), len(closed(root, FILL))
            refusals = night.refusals()
            setting.let(case)
            night.wait_for(lambda: kind in setting.answers()[num_asked:], f"an answer of the model: {kind}")  # noqa: B023
            said, is_refused = SAID[kind].get(name) or SAID[kind][""], kind == "context"
            if case == CUT_OFF and name == "opencode":  # it worked, and then slept: no other than one that is slow
                said, is_refused = f"no end after {seconds:.0f} s: stopped", True
            if is_refused:  # the next brief says why
                night.until(f"^proposal refused: {name}: .*{said}")
                assert len(night.refusals()) > len(refusals)
            else:
                line = night.until(f"^{name}: {said}.*; asked again at .*")
                meanings.add(line.split(": ")[1])
                _, status, _ = nightshift(root, "status")
                assert re.search(f"waiting: +{name}: {said}.*; asked again at .*; the slots run", status), status
            night.wait_for(lambda: len(closed(root, FILL)) > num_fills, "an experiment meanwhile")  # noqa: B023
            if case == CUT_OFF:
                assert "edit" in [answer.get("tool") for answer in setting.answers()[num_asked:] if answer != kind]
                assert closed(root, name) == []
                assert name not in [answer["proposal"]["proposer"] for answer in state(root)["pending"]]
            if not is_refused:
                assert night.refusals() == refusals
                night.wait_for(lambda: re.search(f"waiting: +{name}: {said}", night.summary()), "a summary")  # noqa: B023
        (root / "STOP").touch()
        code, stdout, stderr = night.end()
    assert code == 0, stderr
    assert (problems(root), leftovers(root)) == ([], [])
    notified = [message["why"] for message, _ in heard(folder) if message["event"] == "agent unavailable"]
    assert {why.split(": ")[1] for why in notified} == meanings
    assert ("reported no dollars" in stderr) == (not COSTS[name][2])
    for record in closed(root, name):
        proposal, cost = record.proposal, record.proposal.cost
        assert record.run.new is not None
        assert [*record.run.new.keys] == ["trainer.optim.lr"]
        assert (proposal.description, proposal.prediction) == (HYPOTHESIS, "+1.0 pp")
        assert proposal.sandbox == sandbox
        usual = ("was kept meanwhile", "refused: ")  # of earlier proposals
        assert [note for note in proposal.notes if not any(text in note for text in usual)] == []
        assert cost is not None
        assert (cost.tokens_in, cost.tokens_out, bool(cost.dollars)) == COSTS[name]
    briefs = [line for line in setting.requests() if "so that experiment" in line["prompt"]]
    assert len(briefs) >= 8
    assert [line for line in briefs if f"\n> {DIRECTION}\n" not in line["prompt"]] == []
