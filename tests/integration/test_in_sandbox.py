"""An agent in the real bubblewrap, as whoever runs the tests and, if that is root, as nobody too."""

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

from nightshift.agents.agent import Agent
from nightshift.agents.clone import Clone
from nightshift.agents.enter import LANDLOCK_CREATE_RULESET
from nightshift.agents.presets import PRESETS, login_of
from nightshift.agents.sandbox import choose
from nightshift.campaign.git import Repo
from nightshift.errors import Interrupted
from tests.checkouts import ROOT, commit_all
from tests.conftest import CAMPAIGN
from tests.night_checkout import finish, furnish, leftovers, nightshift, problems, records, start, state, whole_night
from tests.waiting import wait_for

BURGLAR = ROOT / "tests" / "stand_in_burglar.py"
LIBRARIES = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
NOBODY = 65534
TOKEN = '{"claudeAiOauth": {"accessToken": "planted"}}'


def why_no_bwrap(*as_user: str) -> str | None:
    """What bubblewrap says to the plainest of sandboxes."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "bubblewrap is not installed"
    words = [*as_user, bwrap, "--unshare-user", "--ro-bind", "/", "/", "true"]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stderr.strip() or f"bwrap: exit {done.returncode}" if done.returncode else None


pytestmark = pytest.mark.skipif(why_no_bwrap() is not None, reason=str(why_no_bwrap()))


@dataclass
class User:
    """A user with a home, a campaign and secrets, who starts agents."""

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
        """A file of the user's, below the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(self, agent: str, *before: str, sandbox: str = "bwrap", **environ: str) -> dict[str, Any]:
        """The agent in a sandbox; `before`: words of a command that runs the harness."""
        self.write("temporary/made", "")
        if self.as_user:
            subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(self.folder)], check=True)
        env, temporary = {**self.environ, **environ}, str(self.folder / "temporary")
        asked: dict[str, Any] = {"agent": agent, "sandbox": sandbox, "root": str(self.root), "temporary": temporary}
        asked |= {"environ": env, "libraries": LIBRARIES}
        words = [*before, *self.as_user, self.python, "-P", str(ROOT / "tests" / "in_sandbox.py"), json.dumps(asked)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=env, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told


def furnished(folder: Path, as_user: tuple[str, ...], python: str) -> User:
    user = User(folder, as_user, python)
    user.root.mkdir()
    for name in ("train.toml", "rules.toml", "runs/0001/record.json"):
        user.write(f"checkout/{name}", "lr = 0\n")
    user.write("checkout/.gitignore", "runs/\n")
    commit_all(user.root, CAMPAIGN)
    user.write("gsm8k/test.jsonl", "test")
    user.write("home/.ssh/id_ed25519", "private")
    user.write("home/.cache/huggingface/token", "private")
    return user


@pytest.fixture(params=["me", "nobody"])
def user(request: pytest.FixtureRequest) -> Iterator[User]:
    if request.param == "me":
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            yield furnished(Path(folder), (), sys.executable)
        return
    if os.getuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can be somebody else")
    setpriv = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    if why := why_no_bwrap(*setpriv):
        pytest.skip(why)
    check = f"import sys; sys.path[:0] = {LIBRARIES!r}; import nightshift.agents.agent"
    for python in (f"/usr/bin/python3.{sys.version_info.minor}", sys.executable):
        if subprocess.run([*setpriv, python, "-Pc", check], capture_output=True).returncode == 0:
            break
    else:
        pytest.skip("nobody may not read the interpreter and its libraries")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield furnished(Path(folder), setpriv, python)


def burgled(user: User, sandbox: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """What it looked for, what it found, and how its process went."""
    sleep = subprocess.Popen([*user.as_user, "sleep", "600"], stdin=subprocess.DEVNULL)
    with sleep as victim, socket.socket(socket.AF_UNIX) as abstract, socket.create_server(("127.0.0.1", 0)) as server:
        abstract.bind(f"\0nightshift-test-{os.getpid()}")
        abstract.listen()
        names = ("checkout/rules.toml", "checkout/runs/0001/record.json", "checkout/.git/HEAD", "gsm8k/test.jsonl")
        hidden = [str(user.folder / name) for name in (*names, "home/.ssh/id_ed25519", "home/.cache")]
        hidden.append(str(ROOT / ".venv" / "pyvenv.cfg"))
        facts: dict[str, Any] = {"pid": victim.pid, "port": server.getsockname()[1], "hidden": hidden}
        facts |= {"abstract": abstract.getsockname()[1:].decode(), "secret": "my-secret", "prompt": ""}
        told = user.write("mine/facts.json", json.dumps(facts))
        burglar = user.write("mine/burglar.py", BURGLAR.read_text())
        try:
            ended = user.run(shlex.join([user.python, str(burglar), str(told)]), sandbox=sandbox)
        finally:
            victim.kill()
    assert ended["cause"] is None, ended
    return hidden, json.loads(ended["log"]), ended


@pytest.mark.slow
def test_an_agent_that_has_read_the_sources_finds_no_way_out(user: User) -> None:
    _, found, ended = burgled(user, "bwrap")
    assert (ended["sandbox"], ended["warning"], ended["notes"]) == ("bwrap", "", [])
    assert (found["stdin"], found["git"], found["home"]) == ("the brief", " M train.toml\n", "/agent")
    nothing = ("hidden", "sockets", "writable", "new files", "system", "environments", "shared memory")
    assert {name: found[name] for name in nothing} == {name: [] for name in nothing}
    assert found["processes"] == 0
    assert found["signal"] == found["trace"] == "No such process"
    assert found["mount"] == found["unmount"] == found["device"] == "Operation not permitted"
    assert found["namespace"] in ("No space left on device", "Operation not permitted")  # the former: --disable-userns
    assert found["terminal"] == "No such device or address"
    assert found["rename"] == "Device or resource busy"
    assert (found["no new privileges"], found["capabilities"]) == (1, ["0" * 16, "0" * 16])
    assert found["descriptors"] == ["0", "1", "2"]
    devices = "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero core"
    assert set(found["devices"]) <= set(devices.split())
    secrets = {"STAND_IN_API_KEY", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "NIGHTSHIFT_GSM8K"}
    assert not secrets & set(found["variables"])
    assert found["localhost"] == "done: None"  # as SECURITY.md says: the network is shared
    if ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, 0, 1) >= 6:  # Landlock's scopes
        assert found["abstract socket"] == "Operation not permitted"


def test_the_same_agent_without_a_sandbox_finds_all_of_it(user: User) -> None:
    hidden, found, ended = burgled(user, "none")
    assert ended["sandbox"] == "none"
    assert ended["warning"].startswith("agent: not isolated: it has your rights, so it can change code, records")
    assert found["hidden"] == hidden
    assert (found["abstract socket"], found["signal"], found["trace"]) == ("done: None", "done: None", "done")
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


def renewed(user: User, sandbox: str, python: str) -> str:
    """Check what comes back from a program that renews its token and writes a hook. Return what the program prints."""
    user.write("home/.claude/.credentials.json", TOKEN).chmod(0o600)
    user.write("home/.claude/settings.json", '{"model": "mine"}')
    user.write("bin/claude", RENEWING.format(python=python)).chmod(0o755)
    ended = user.run("claude", sandbox=sandbox, PATH=f"{user.folder}/bin:{user.environ['PATH']}")
    assert (ended["cause"], ended["notes"]) == (None, []), ended
    own = user.home / ".claude"
    assert json.loads((own / ".credentials.json").read_text()) == {"claudeAiOauth": {"accessToken": "renewed"}}
    assert (own / "settings.json").read_text() == '{"model": "mine"}'
    assert sorted(path.name for path in own.iterdir()) == [".credentials.json", "settings.json"]
    return str(ended["log"])


@pytest.mark.slow
def test_a_planted_token_is_read_a_renewed_one_survives_and_a_written_hook_does_not(user: User) -> None:
    preset = PRESETS["claude"]
    flags = shlex.split(preset.command.replace("{sandbox}", preset.sandbox_options[1]))[1:]
    assert flags[-1] == '{"sandbox":{"enabled":false}}'
    assert f"read planted {{'model': 'mine'}} {flags}" in renewed(user, "bwrap", user.python)


def test_a_token_that_was_renewed_survives_a_night_that_is_stopped_now(tmp_path: Path) -> None:
    user = furnished(tmp_path, (), sys.executable)
    own = user.write("home/.claude/.credentials.json", TOKEN)
    user.write("home/.claude/settings.json", "{}")
    program = user.write("home/bin/claude", RENEWING.format(python=sys.executable) + "import time; time.sleep(600)\n")
    program.chmod(0o755)
    (tmp_path / "temporary").mkdir()
    environ = {**user.environ, "PATH": f"{program.parent}:{user.environ['PATH']}"}
    clone = Clone(Repo(user.root), tmp_path / "temporary")
    sandbox = choose("bwrap", ["claude"], PRESETS["claude"].login, user.root, environ, clone)
    agent = Agent("claude", ("claude",), 600.0, clone, sandbox)

    work = agent.run(b"lr = 1\n", "", tmp_path / "log", {})
    next(work)
    wait_for(lambda: next(work) is None and (clone.folder / "home" / ".claude" / "projects").exists())
    with pytest.raises(Interrupted):
        work.throw(Interrupted("stopped"))
    clone.clear()
    assert "renewed" in own.read_text()


def looked(user: User, sandbox: str, sees: Path, script: str) -> str:
    """What a shell in the sandbox prints that may see a path and two variables of the user's."""
    (user.folder / "temporary").mkdir(exist_ok=True)
    environ = {**user.environ, "TZ": "Asia/Tokyo", "HF_TOKEN": "mine"}
    clone = Clone(Repo(user.root), user.folder / "temporary")
    login = login_of("my own", environ, ["HF_TOKEN"], [str(sees)])
    chosen = choose(sandbox, ["sh"], login, user.root, environ, clone)
    clone.open(b"", {})
    try:
        chosen.furnish(clone)
        clone.prompt.touch()
        words, variables = chosen.enclose(["sh", "-c", script], clone)
        return subprocess.run(words, env=variables, cwd="/", stdout=subprocess.PIPE, text=True).stdout
    finally:
        chosen.end()
        clone.clear()


SEEN = """cd {0}; cat docs/notes docs/link; echo no > docs/new || echo read-only; ls other 2>/dev/null || echo nothing
echo $TZ $HF_TOKEN $AWS_SECRET_ACCESS_KEY; date -d @0 +%H"""


def seen_folder(user: User) -> Path:
    """A folder of the user's behind a link, with one beside it."""
    user.write("real/notes", "mine\n")
    (user.folder / "real" / "link").symlink_to("notes")
    (user.folder / "other").mkdir(mode=0o700)
    (user.folder / "other" / "key").touch()
    (user.folder / "docs").symlink_to("real")
    return user.folder / "docs"


def test_a_path_that_you_name_is_seen_and_not_written_to_and_a_variable_goes_in(tmp_path: Path) -> None:
    user = furnished(tmp_path, (), sys.executable)
    told = looked(user, "bwrap", seen_folder(user), SEEN.format(tmp_path))
    assert told == "mine\nmine\nread-only\nnothing\nUTC mine\n00\n"
    file = user.write("other/one", "a file\n")
    assert looked(user, "bwrap", file, f"cat {file}; ls {file.parent}") == "a file\none\n"


@pytest.mark.slow
def test_where_proc_is_refused_bubblewrap_is_weaker_says_so_and_holds_the_rest(tmp_path: Path) -> None:
    """As in a container: a part of /proc is covered, so the kernel lets nobody mount another."""
    if os.getuid() != 0:
        pytest.skip("only root can cover a part of /proc")
    user = furnished(tmp_path, (), sys.executable)
    covered = ("unshare", "--mount", "sh", "-c", 'mount --bind /dev/null /proc/version && exec "$@"', "sh")
    if subprocess.run([*covered, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this root may not mount")
    look = f"sh -c 'ls {user.root} {user.folder}/gsm8k /proc/{os.getpid()}/root/; ls /proc'"
    ended = user.run(look, *covered, sandbox="auto")
    assert ended["sandbox"] == "bwrap (the agent sees the names of other processes)"
    assert ended["warning"].startswith(f"sandbox: {ended['sandbox']}, because bwrap: Can't mount proc")
    assert f"\n{os.getpid()}\n" in ended["log"]  # which is what it says
    assert ended["log"].count("No such file or directory") == 2
    assert f"'/proc/{os.getpid()}/root/': Permission denied" in ended["log"]
    refused = user.run(look, *covered, sandbox="bwrap")
    assert refused["refused"].startswith("--sandbox bwrap: Can't mount proc")


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


def test_a_night_in_bubblewrap_is_an_ordinary_one_and_leaves_no_daemon(checkout: Path) -> None:
    root = furnish(checkout)
    agent = root.parent / "agent.py"
    agent.write_text(DAEMON.format(folder=f"{root.parent}/"))
    command = shlex.join([sys.executable, str(agent), "{prompt_file}"])
    code, _, stderr = whole_night(root, agent=command, sandbox="bwrap", experiments=2)
    assert code == 0, stderr
    assert "sandbox" not in stderr
    assert problems(root) == []
    assert leftovers(root) == []
    last = records(root)[-1]
    assert (last.proposal.description, last.proposal.prediction, last.proposal.notes) == ("faster", "+1 pp", ())
    assert (last.proposal.sandbox, state(root)["sandbox"]) == ("bwrap", "bwrap")


def test_a_killed_night_leaves_no_process_of_an_agent_in_bubblewrap(checkout: Path) -> None:
    root = furnish(checkout)
    hang = "import signal, time; signal.signal(15, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
    night = start(root, agent=shlex.join([sys.executable, "-c", hang]), sandbox="bwrap", experiments=2)
    log = root / "runs" / "agent" / "0002-1.log"
    wait_for(lambda: night.poll() is not None or (log.exists() and log.read_text() == "here\n"))
    assert any("bwrap" in process.name() for process in leftovers(root)), finish(night)
    night.kill()
    night.communicate()
    wait_for(lambda: not leftovers(root))


@pytest.mark.slow
def test_doctor_asks_an_agent_one_question_in_a_sandbox(checkout: Path) -> None:
    root = furnish(checkout)
    shutil.copy2(ROOT / "pyproject.toml", root)
    code, stdout, stderr = nightshift(root, "doctor", "--engine", "trl", "--agent", "sh -c 'cat; pwd; echo $HOME'")
    assert "all       agent         ok       sh: '/agent' (sandbox: bwrap)" in stdout, (code, stdout, stderr)
    code, stdout, _ = nightshift(root, "doctor", "--engine", "trl", "--agent", "sh -c 'echo no credit; exit 3'")
    assert "PROBLEM  sh: billing: no credit (sandbox: bwrap)" in stdout
    assert code == 2
