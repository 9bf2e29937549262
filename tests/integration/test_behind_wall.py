"""The wall around an agent, with the real bubblewrap, as whoever runs the tests and, if that is root, as nobody too."""

from __future__ import annotations

import ctypes
import http.server
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nightshift.agents.agent import Agent
from nightshift.agents.clone import Clone
from nightshift.agents.presets import PRESETS
from nightshift.agents.sandbox import choose
from nightshift.agents.sandbox_entry import LANDLOCK_CREATE_RULESET
from nightshift.campaign.git import Repo
from nightshift.errors import Interrupted
from tests.checkouts import ROOT, commit_all
from tests.conftest import CAMPAIGN
from tests.night_checkout import finish, furnish, leftovers, nightshift, problems, records, start, whole_night
from tests.waiting import wait_for

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
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env={**self.environ, **environ}, cwd=self.folder
        )
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told


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
    check = f"import sys; sys.path[:0] = {LIBRARIES!r}; import nightshift.agents.agent"
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
    assert (ended["shortfall"], ended["notes"]) == ("", [])
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


RENEWING = """#!{python}
import json, os, pathlib, sys
home = pathlib.Path(os.environ["HOME"], ".claude")
found = json.loads((home / ".credentials.json").read_text())
print("read", found["claudeAiOauth"]["accessToken"], json.loads((home / "settings.json").read_text()), sys.argv[1:])
found["claudeAiOauth"]["accessToken"] = "renewed"
(home / ".new").write_text(json.dumps(found))
(home / ".new").rename(home / ".credentials.json")
(home / "settings.json").write_text(json.dumps({{"hooks": {{"Stop": [{{"command": "evil"}}]}}}}))
(home / "projects").mkdir()
"""


def test_a_planted_token_is_read_a_renewed_one_survives_and_a_written_hook_does_not(person: Person) -> None:
    person.write("home/.claude/.credentials.json", TOKEN)
    person.write("home/.claude/settings.json", '{"model": "mine"}')
    person.write("home/bin/claude", RENEWING.format(python=person.python)).chmod(0o755)
    ended = person.run("claude", PATH=f"{person.home}/bin:{person.environ['PATH']}")
    assert (ended["cause"], ended["notes"]) == (None, []), ended
    flags = "'-p', '--output-format', 'json', '--permission-mode', 'acceptEdits', '--settings'"
    assert f"read planted {{'model': 'mine'}} [{flags}" in ended["log"]
    own = person.home / ".claude"
    assert json.loads((own / ".credentials.json").read_text()) == {"claudeAiOauth": {"accessToken": "renewed"}}
    assert (own / "settings.json").read_text() == '{"model": "mine"}'
    assert sorted(path.name for path in own.iterdir()) == [".credentials.json", "settings.json"]


def test_a_token_that_was_renewed_survives_a_night_that_is_stopped_now(tmp_path: Path) -> None:
    person = furnished(tmp_path, (), sys.executable)
    own = person.write("home/.claude/.credentials.json", TOKEN)
    person.write("home/.claude/settings.json", "{}")
    program = person.write("home/bin/claude", RENEWING.format(python=sys.executable) + "import time; time.sleep(600)\n")
    program.chmod(0o755)
    (tmp_path / "temporary").mkdir()
    environ = {**person.environ, "PATH": f"{program.parent}:{person.environ['PATH']}"}
    clone = Clone(Repo(person.root), tmp_path / "temporary")
    wall, _ = choose("bwrap", ["claude"], PRESETS["claude"].login, (), environ, clone)
    agent = Agent("claude", ("claude",), environ, 600.0, clone, wall)

    def is_stopping() -> bool:
        if (clone.folder / "home" / ".claude" / "projects").exists():
            raise Interrupted("stopped")
        return False

    with pytest.raises(Interrupted):
        agent.run(b"lr = 1\n", "", tmp_path / "log", is_stopping)
    clone.clear()
    assert "renewed" in own.read_text()


def test_where_proc_is_refused_the_wall_is_a_weaker_one_that_says_so_and_holds_the_rest(tmp_path: Path) -> None:
    """As in a container: a part of /proc is covered, so the kernel lets nobody mount another."""
    if os.getuid() != 0:
        pytest.skip("only root can cover a part of /proc")
    person = furnished(tmp_path, (), sys.executable)
    covered = ("unshare", "--mount", "sh", "-c", 'mount --bind /dev/null /proc/version && exec "$@"', "sh")
    if subprocess.run([*covered, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this root may not mount")
    look = f"sh -c 'ls {person.root} {person.folder}/gsm8k /proc/{os.getpid()}/root/; ls /proc'"
    ended = person.run(look, *covered, sandbox="auto")
    assert ended["shortfall"].startswith(
        "a weaker OS wall around the agent: the agent sees the names of other processes"
    )
    assert "bwrap: Can't mount proc" in ended["shortfall"]
    assert f"\n{os.getpid()}\n" in ended["log"]  # which is what it says
    assert ended["log"].count("No such file or directory") == 2
    assert f"'/proc/{os.getpid()}/root/': Permission denied" in ended["log"]
    refused = person.run(look, *covered, sandbox="bwrap")
    assert refused["refused"].startswith("--sandbox bwrap: bubblewrap: bwrap: Can't mount proc")


def test_where_user_namespaces_are_forbidden_auto_goes_without_and_bwrap_is_refused(tmp_path: Path) -> None:
    person = furnished(tmp_path, (), sys.executable)
    forbidden = ("bwrap", "--unshare-user", "--disable-userns", "--dev-bind", "/", "/")
    if subprocess.run([*forbidden, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this bubblewrap cannot forbid them")
    ended = person.run("sh -c pwd", *forbidden, sandbox="auto")
    assert ended["shortfall"].startswith("no OS wall around the agent: bubblewrap: bwrap: ")
    assert ended["cause"] is None
    refused = person.run("sh -c pwd", *forbidden, sandbox="bwrap")
    assert refused["refused"].startswith("--sandbox bwrap: bubblewrap: bwrap: ")
    assert refused["refused"].endswith("Install bubblewrap and allow it user namespaces; or take --sandbox none.")


DAEMON = """
import os, pathlib, sys
train = pathlib.Path("train.toml")
train.write_text(train.read_text().replace("6e-7", "6e-6"))
pathlib.Path("hypothesis.txt").write_text("HYPOTHESIS: faster\\nPREDICTION: +1 pp\\n")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", {folder!r}], {{}})
    os._exit(0)
os.read(os.open(sys.argv[1], os.O_RDONLY), 1)
"""


def test_a_night_behind_the_wall_is_an_ordinary_one_and_leaves_no_daemon(checkout: Path) -> None:
    root = furnish(checkout)
    agent = root.parent / "agent.py"
    agent.write_text(DAEMON.format(folder=f"{root.parent}/"))
    command = shlex.join([sys.executable, str(agent), "{prompt_file}"])
    code, _, stderr = whole_night(root, agent=command, sandbox="bwrap", experiments=2)
    assert code == 0, stderr
    assert "OS wall" not in stderr
    assert problems(root) == []
    assert leftovers(root) == []
    last = records(root)[-1]
    assert (last.proposal.description, last.proposal.prediction, last.proposal.notes) == ("faster", "+1 pp", ())


def test_a_killed_night_leaves_no_process_of_an_agent_behind_its_wall(checkout: Path) -> None:
    root = furnish(checkout)
    hang = "import signal, time; signal.signal(15, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
    night = start(root, agent=shlex.join([sys.executable, "-c", hang]), sandbox="bwrap", experiments=2)
    log = root / "runs" / "agent" / "0002-1.log"
    wait_for(lambda: night.poll() is not None or (log.exists() and log.read_text() == "here\n"))
    assert any("bwrap" in process.name() for process in leftovers(root)), finish(night)
    night.kill()
    night.communicate()
    wait_for(lambda: not leftovers(root))


def test_a_wall_that_is_asked_for_and_cannot_be_had_is_refused_before_anything_is_done(checkout: Path) -> None:
    root = furnish(checkout)
    agent = root / "agent.py"
    agent.write_text("")
    code, stdout, stderr = whole_night(root, agent=f"{sys.executable} {agent}", sandbox="bwrap", experiments=2)
    assert (code, stdout) == (2, "")
    assert stderr.endswith(f"the agent's {agent} lies where no agent may look. "
                           "Install it in a folder of its own; or --sandbox none.\n")  # fmt: skip
    assert not (root / "runs" / "night.json").exists()


def test_doctor_asks_an_agent_one_question_behind_the_wall(checkout: Path) -> None:
    root = furnish(checkout)
    shutil.copy2(ROOT / "pyproject.toml", root)
    code, stdout, stderr = nightshift(root, "doctor", "--engine", "trl", "--agent", "sh -c 'cat; pwd; echo $HOME'")
    assert "all       agent         ok       sh: '/agent' (behind the OS wall)" in stdout, (code, stdout, stderr)
    code, stdout, _ = nightshift(root, "doctor", "--engine", "trl", "--agent", "sh -c 'echo no credit; exit 3'")
    assert "PROBLEM  sh: exit code 3; its last words: no credit (behind the OS wall)" in stdout
    assert code == 2


class Api(http.server.BaseHTTPRequestHandler):
    """A stand-in for a provider: keeps what it is asked with, and knows nobody."""

    tokens: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.tokens.append(self.headers.get("authorization", ""))
        self.send_error(401)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_three_agents_of_the_npm_registry_run_behind_the_wall(tmp_path: Path) -> None:
    """Slow, and only where npm reaches its registry; whether a real login works, only `doctor --agent` can tell."""
    names = ("@anthropic-ai/claude-code", "@openai/codex", "@google/gemini-cli")
    npm = shutil.which("npm") or pytest.skip("npm is not installed")
    done = subprocess.run([npm, "install", "--prefix", str(tmp_path / "npm"), *names], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"npm: {done.stderr.strip()[-200:]}")
    (tmp_path / "person").mkdir()
    person = furnished(tmp_path / "person", (), sys.executable)
    path = f"{tmp_path}/npm/node_modules/.bin:{person.environ['PATH']}"
    said = {name: person.run(f"{name} --version", PATH=path) for name in ("claude", "codex", "gemini")}
    assert all(re.search(r"\d+\.\d+\.\d+", ended["log"]) and not ended["cause"] for ended in said.values()), said
    print({name: ended["log"] for name, ended in said.items()})
    person.write("home/.claude/.credentials.json", json.dumps({"claudeAiOauth": {
        "accessToken": "planted", "refreshToken": "r", "expiresAt": 9999999999999, "scopes": ["user:inference"],
    }}))  # fmt: skip
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        person.run("claude", PATH=path, ANTHROPIC_BASE_URL=url)
        server.shutdown()
    assert "Bearer planted" in Api.tokens
