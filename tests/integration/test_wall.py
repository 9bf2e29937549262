"""The wall around an agent, with the real bubblewrap, as whoever runs the tests and, if that is root, as nobody too."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nightshift.guard.doorstep import LANDLOCK_CREATE_RULESET
from tests.checkouts import ROOT, commit_all
from tests.conftest import CAMPAIGN

BURGLAR = ROOT / "tests" / "stand_in_burglar.py"
LIBRARIES = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
NOBODY = 65534
TOKEN = '{"claudeAiOauth": {"accessToken": "planted"}}'


def why_no_wall(*as_user: str) -> str | None:
    """What bubblewrap says to the plainest of walls."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "bubblewrap is not installed"
    done = subprocess.run(
        [*as_user, bwrap, "--unshare-user", "--ro-bind", "/", "/", "true"], capture_output=True, text=True
    )
    return done.stderr.strip() or f"bwrap: exit {done.returncode}" if done.returncode else None


pytestmark = pytest.mark.skipif(why_no_wall() is not None, reason=str(why_no_wall()))


@dataclass
class Person:
    """Somebody with a home, a campaign and secrets, who starts agents."""

    folder: Path
    as_user: tuple[str, ...]
    python: str

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def root(self) -> Path:
        return self.folder / "checkout"

    @property
    def environ(self) -> dict[str, str]:
        names = ("PATH", "LANG", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
        mine = {name: os.environ[name] for name in names if name in os.environ}
        secrets = {
            "AWS_SECRET_ACCESS_KEY": "my-secret",
            "SSH_AUTH_SOCK": f"{self.folder}/ssh",
            "STAND_IN_API_KEY": "key",
        }
        return {**mine, **secrets, "HOME": str(self.home), "NIGHTSHIFT_GSM8K": str(self.folder / "gsm8k")}

    def write(self, name: str, text: str) -> Path:
        """A file of this person's, below the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(self, agent: str, *before: str, sandbox: str = "bwrap", **environ: str) -> dict[str, Any]:
        """The agent behind a wall; `before`: words of a command that runs the harness."""
        self.write("temporary/made", "")
        if self.as_user:
            subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(self.folder)], check=True)
        asked = {
            "agent": agent,
            "sandbox": sandbox,
            "root": str(self.root),
            "temporary": str(self.folder / "temporary"),
        }
        asked |= {"environ": {**self.environ, **environ}, "libraries": LIBRARIES}  # type: ignore[dict-item]
        words = [*before, *self.as_user, self.python, "-P", str(ROOT / "tests" / "behind_wall.py"), json.dumps(asked)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=self.environ, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def command(self, code: str) -> str:
        """An agent that is a Python program in a file."""
        return shlex.join([self.python, str(self.write("mine/agent.py", code))])


def furnished(folder: Path, as_user: tuple[str, ...], python: str) -> Person:
    person = Person(folder, as_user, python)
    person.root.mkdir()
    for name in ("train.toml", "rules.toml", "runs/0001/record.json"):
        person.write(f"checkout/{name}", "lr = 0\n")
    person.write("checkout/.gitignore", "runs/\n")
    commit_all(person.root, CAMPAIGN)
    person.write("gsm8k/test.jsonl", "sealed")
    person.write("home/.ssh/id_ed25519", "private")
    person.write("home/.cache/huggingface/token", "private")
    return person


@pytest.fixture(params=["me", "nobody"])
def person(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Person]:
    if request.param == "me":
        yield furnished(tmp_path, (), sys.executable)
        return
    if os.getuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can be somebody else")
    user = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    if why := why_no_wall(*user):
        pytest.skip(why)
    check = f"import sys; sys.path[:0] = {LIBRARIES!r}; import nightshift.proposers.agent"
    for python in (f"/usr/bin/python3.{sys.version_info.minor}", sys.executable):
        if subprocess.run([*user, python, "-Pc", check], capture_output=True).returncode == 0:
            break
    else:
        pytest.skip("nobody may not read the interpreter and its libraries")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield furnished(Path(folder), user, python)


def burgled(person: Person, sandbox: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """What it looked for, what it found, and how its process went."""
    sleep = subprocess.Popen([*person.as_user, "sleep", "600"], stdin=subprocess.DEVNULL)
    with sleep as victim, socket.socket(socket.AF_UNIX) as abstract, socket.create_server(("127.0.0.1", 0)) as server:
        abstract.bind(f"\0nightshift-test-{os.getpid()}")
        abstract.listen()
        names = ("checkout/rules.toml", "checkout/runs/0001/record.json", "checkout/.git/HEAD", "gsm8k/test.jsonl")
        hidden = [str(person.folder / name) for name in (*names, "home/.ssh/id_ed25519", "home/.cache")]
        hidden.append(str(ROOT / ".venv" / "pyvenv.cfg"))
        facts: dict[str, Any] = {"pid": victim.pid, "port": server.getsockname()[1], "hidden": hidden}
        facts |= {"abstract": abstract.getsockname()[1:].decode(), "secret": "my-secret", "prompt": ""}
        told = person.write("mine/facts.json", json.dumps(facts))
        burglar = person.write("mine/burglar.py", BURGLAR.read_text())
        try:
            ended = person.run(shlex.join([person.python, str(burglar), str(told)]), sandbox=sandbox)
        finally:
            victim.kill()
    assert ended["cause"] is None, ended
    return hidden, json.loads(ended["log"]), ended


def test_an_agent_that_has_read_the_sources_finds_no_way_out(person: Person) -> None:
    _, found, ended = burgled(person, "bwrap")
    assert (ended["shortfall"], ended["notes"], ended["changes"]) == ("", [], [])
    assert (found["stdin"], found["git"], found["home"]) == ("the brief", " M train.toml\n", "/agent")
    nothing = ("hidden", "sockets", "writable", "new files", "system", "environments", "shared memory")
    assert {name: found[name] for name in nothing} == {name: [] for name in nothing}
    assert found["processes"] == 0
    assert found["signal"] == found["trace"] == "No such process"
    assert found["keys"] == ["Function not implemented"] * 3
    for name in ("mount", "unmount", "handle", "device"):
        assert found[name] == "Operation not permitted", name
    assert found["another user"] == "Invalid argument"  # it has no other in its user namespace
    assert found["namespace"] in ("No space left on device", "Operation not permitted")  # the former: --disable-userns
    assert found["terminal"] == "No such device or address"
    assert found["link"] in ("Invalid cross-device link", "Operation not permitted")
    assert found["rename"] == "Device or resource busy"
    assert (found["no new privileges"], found["capabilities"]) == (1, ["0" * 16, "0" * 16])
    assert found["descriptors"] == ["0", "1", "2"]
    devices = "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero core"
    assert set(found["devices"]) <= set(devices.split())
    assert "STAND_IN_API_KEY" in found["variables"]
    assert not {"AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "NIGHTSHIFT_GSM8K"} & set(found["variables"])
    assert found["localhost"] == "done: None"  # as SECURITY.md says: the network is shared
    if ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, 0, 1) >= 6:  # Landlock's scopes
        assert found["abstract socket"] == "Operation not permitted"


def test_the_same_agent_without_a_wall_finds_all_of_it(person: Person) -> None:
    hidden, found, ended = burgled(person, "none")
    assert ended["shortfall"] == "no OS wall around the agent: --sandbox none"
    assert found["hidden"] == hidden
    assert (
        found["abstract socket"] == found["signal"] == found["trace"].removesuffix(": None") + ": None" == "done: None"
    )
    assert found["processes"] > 0
    assert found["environments"]
