"""An agent under a uid of its own (--sandbox user), with real processes and nights. Only root can start one."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nightshift.agents.clone import Clone
from nightshift.agents.presets import PRESETS
from nightshift.agents.sandbox import OtherUser, choose, end_user
from nightshift.campaign.git import Repo
from nightshift.errors import UsageError
from tests.checkouts import ROOT, small_checkout
from tests.conftest import slow
from tests.integration.test_in_sandbox import SEEN, User, furnished, looked, renewed, seen_folder
from tests.night_checkout import finish, furnish, good_night, records, start, state, whole_night
from tests.waiting import wait_for

PYTHON = "/usr/bin/python3"  # one that every user can read; that of .venv may lie in HOME


def why_not() -> str | None:
    if os.getuid() != 0:
        return "only root can start a process as another user"
    if shutil.which("setpriv") is None or not Path(PYTHON).exists():
        return f"setpriv or {PYTHON} is not installed"
    return None


pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter, with a HOME that is closed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        home = Path(name, "home")
        home.mkdir(mode=0o700)
        (home / "secret").write_text("private")
        yield Path(name)


@pytest.fixture
def root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout for whole nights, a dataset and a cache."""
    root = furnish(small_checkout(folder))
    (folder / "data").mkdir(mode=0o700)
    (folder / "data" / "test.jsonl").write_text("test")
    (folder / "cache").mkdir()
    (folder / "cache" / "weights").write_text("weights")
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("NIGHTSHIFT_GSM8K", str(folder / "data"))
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    return root


@pytest.fixture
def user(folder: Path) -> User:
    """A user with a campaign and secrets, whose agents run as another user."""
    user = furnished(folder, (), sys.executable)
    (folder / "gsm8k").chmod(0o700)
    return user


REACHING = """
import json, os, pathlib, shutil, sys
def attempt(action):
    try:
        return f"done: {action()!r}"
    except OSError as error:
        return os.strerror(error.errno)
folder = pathlib.Path(sys.argv[1])
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
told = {name: status[name] for name in ("NoNewPrivs", "CapPrm", "CapEff", "CapBnd", "CapInh", "Groups")}
told["uid"] = os.getresuid() + os.getresgid()
told["session"] = os.getsid(0) == os.getpid()
for name in (
    "checkout/runs/0001/record.json", "checkout/results.tsv", "checkout/.git/config", "home/secret", "data/test.jsonl"
):
    told["read " + name] = attempt(lambda: open(folder / name).read())
told["environment"] = attempt(lambda: open(f"/proc/{os.getppid()}/environ").read())
kept = ("checkout/train.toml", "checkout/.git/HEAD", "checkout/new.py", "cache/weights", "cache/new")
for name in (*kept, *sys.argv[2:]):
    told["write " + name] = attempt(lambda: open(folder / name, "a").close())
told["signal"] = attempt(lambda: os.kill(os.getppid(), 9))
for place in ("/tmp", "/dev/shm", "/var/tmp"):
    path = shutil.copy2("/bin/sh", f"{place}/{folder.name}-agent")
    os.chmod(path, 0o4755)
train = pathlib.Path("train.toml")
train.write_text(train.read_text().replace("6e-7", "6e-6"))
pathlib.Path("hypothesis.txt").write_text("HYPOTHESIS: faster\\nPREDICTION: +1 pp\\n")
print(json.dumps(told), flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
        os.execve(sys.executable, [sys.executable, "-c", code, f"{folder}/daemon"], {})
    os._exit(0)
os.wait()
"""


def processes_of(folder: Path) -> list[str]:
    """Those of agents that name the folder."""
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [shlex.join(command) for command in commands if f"{folder}/daemon" in command]


@pytest.mark.slow
def test_an_agent_as_another_user_reaches_nothing_and_leaves_nothing(folder: Path, root: Path) -> None:
    agent = folder / "agent.py"
    agent.write_text(REACHING)
    library = next((ROOT / ".venv").glob("lib/python*/site-packages/psutil/__init__.py"))
    for_runs = folder / "temporary" / f"runs-of-nightshift-{os.getuid()}"
    command = shlex.join([PYTHON, str(agent), str(folder), str(library), f"{for_runs}/planted"])
    stdout, stderr = good_night(root, agent=command, sandbox="user", experiments=2)
    told = json.loads((root / "runs" / "agent" / "0002-1.log").read_text())
    assert len({*told["uid"]}) == 1
    assert 20_000 <= told["uid"][0] < 40_000
    assert told["session"] is True
    assert (told["NoNewPrivs"], told["Groups"].strip()) == ("1", "")
    assert {told[name] for name in ("CapPrm", "CapEff", "CapBnd", "CapInh")} == {"0" * 16}
    reached = {name: value for name, value in told.items() if " " in name or name == "environment"}
    assert len(reached) == 13
    assert {name: value for name, value in reached.items() if value != "Permission denied"} == {}
    assert told["signal"] == "Operation not permitted"
    left = [path for place in ("/tmp", "/dev/shm", "/var/tmp") for path in Path(place).glob(f"{folder.name}-agent")]
    assert (left, processes_of(folder)) == ([], [])
    last = records(root)[-1].proposal
    assert (last.description, last.sandbox, last.notes, state(root)["sandbox"]) == ("faster", "user", (), "user")
    assert "not isolated" not in stdout + stderr
    assert re.search(r"your variables and files that python3 gets: (\w+, )*\w+\n", stderr)
    assert for_runs.is_dir()
    assert (root / "runs").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_what_a_killed_night_leaves_of_an_agent_is_ended_by_the_next_start(folder: Path, root: Path) -> None:
    agent = folder / "agent.py"
    agent.write_text(REACHING + "import time\ntime.sleep(600)\n")
    command = shlex.join([PYTHON, str(agent), str(folder), str(folder / "none")])
    night = start(root, agent=command, sandbox="user", experiments=2)
    wait_for(lambda: night.poll() is not None or processes_of(folder))
    clone = Clone(Repo(root), folder / "temporary")
    uid = clone.folder.stat().st_gid
    for process in psutil.Process(night.pid).children():
        if "executors.process" in " ".join(process.cmdline()):
            process.kill()
    night.kill()
    finish(night)
    assert processes_of(folder)
    whole_night(root, agent="tpe", experiments=1)
    assert processes_of(folder) == []
    assert end_user(uid) == []


def test_a_login_is_copied_and_a_renewed_token_taken_back(user: User) -> None:
    assert "read planted {'model': 'mine'}" in renewed(user, "user", PYTHON)
    assert (user.home / ".claude" / ".credentials.json").stat().st_uid == 0


@pytest.mark.parametrize(
    ("changed", "mode", "reason"),
    [
        ("home", 0o755, "can read {0}/home: chmod go= {0}/home"),
        slow("gsm8k", 0o755, "can read {0}/gsm8k: chmod go= {0}/gsm8k"),
        ("checkout/rules.toml", 0o666, "can write to {0}/checkout/rules.toml: chmod -R o-w {0}/checkout"),
        slow("", 0o777, "can write to {0}: chmod o-w {0}"),
        slow("prime-rl", 0o777, "can write to {0}/prime-rl: chmod -R o-w {0}/prime-rl"),
        ("temporary", 0o700, "cannot write to {0}/temporary/nightshift-0"),
    ],
)
def test_a_machine_that_does_not_keep_the_agent_out_is_named_and_refused(user, changed, mode, reason) -> None:
    user.write("temporary/made", "")
    user.write("prime-rl/made", "")
    (user.folder / changed).chmod(mode)
    refused = user.run("sh -c true", sandbox="user", NIGHTSHIFT_PRIME_RL=f"{user.folder}/prime-rl")["refused"]
    assert refused.startswith("--sandbox user: uid "), refused
    assert reason.format(user.folder) in refused


def test_a_program_that_the_uid_cannot_read_is_named_with_the_remedy(user: User) -> None:
    program = user.write("home/bin/mine", f"#!{PYTHON}\n")
    program.chmod(0o755)
    refused = user.run("mine", sandbox="user", PATH=f"{program.parent}:/usr/bin:/bin")["refused"]
    assert f" cannot read {program}: put it where every user may read, such as in /usr/local" in refused


@pytest.mark.slow
def test_a_path_that_you_name_is_read_if_the_uid_can_and_not_written_to(user: User) -> None:
    docs = seen_folder(user)
    assert looked(user, "user", docs, SEEN.format(user.folder)) == "mine\nmine\nread-only\nnothing\nUTC mine\n00\n"
    for mode, reason in (
        (0o777, f"can write to {docs}: chmod -R o-w {docs}"),
        (0o700, f"cannot read {docs}: put it where"),
    ):
        docs.chmod(mode)
        with pytest.raises(UsageError, match=f"^--sandbox user: uid .* {re.escape(reason)}"):
            looked(user, "user", docs, "true")


def test_where_bubblewrap_does_not_work_auto_takes_another_user_and_says_why(user: User, monkeypatch) -> None:
    refuses = user.write("bin/bwrap", "#!/bin/sh\necho 'bwrap: No permissions to create a namespace' >&2; exit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setattr(os, "defpath", f"{refuses.parent}:{os.defpath}")
    (user.folder / "temporary").mkdir()
    clone = Clone(Repo(user.root), user.folder / "temporary")
    sandbox = choose("auto", ["sh"], PRESETS["claude"].login, user.root, user.environ, clone)
    assert isinstance(sandbox, OtherUser)
    assert sandbox.warning == "sandbox: user, because bwrap: No permissions to create a namespace"


def test_two_checkouts_have_agents_of_different_uids(folder: Path, root: Path) -> None:
    another = small_checkout(folder / "another")
    environ = {"HOME": str(folder / "home"), "PATH": "/usr/bin:/bin"}
    uids = set[int]()
    for place in (root, another, root):
        clone = Clone(Repo(place), folder / "temporary")
        sandbox = choose("user", ["sh", "-c", "true"], PRESETS["claude"].login, place, environ, clone)
        assert isinstance(sandbox, OtherUser)
        uids.add(sandbox.uid)
    assert len(uids) == 2
