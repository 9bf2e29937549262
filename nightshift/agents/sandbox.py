"""The sandbox of an agent: bubblewrap, another uid where bubblewrap cannot run, or none.

Covered by bubblewrap: the agent can write to its clone, an empty HOME and an empty /tmp. It can read its own program,
the system's programs and libraries, and a few named variables and files (`Places`, `Login`). It sees no checkout,
runs/, cache, data, HOME, socket or other process; a hidden folder inside a visible one is covered by an empty folder.
Covered by another uid: the agent cannot write to the checkout, nor read runs/, data and HOME. A trial before the night
tests this.
Not covered: the network, and with another uid everything that all users of the machine may read.
"""

import os
import pwd
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import psutil

from nightshift.agents.clone import LOGS_NAME, Clone, make_private
from nightshift.campaign.records import NO_SANDBOX
from nightshift.errors import UsageError
from nightshift.executors.process import KILL_SECONDS, describe, is_alive
from nightshift.files import read_file, remove_tree, write_atomically

MAX_BYTES = 1_000_000  # of a copied file; logins have some thousand


@dataclass(frozen=True, slots=True)
class Login:
    """The user's variables and files that a program needs in a sandbox. Names are separated by spaces."""

    variables: str = ""  # patterns of environment variables
    credential: str = ""  # file below HOME with tokens that the program renews; the only file that is copied back
    settings: str = ""  # other files below HOME
    folders: tuple[tuple[str, str], ...] = ()  # folders below HOME, and the variable that moves each folder
    when: tuple[tuple[str, str], ...] = ()  # variables, and the patterns that also apply if any of them is set
    sees: tuple[str, ...] = ()  # paths of --agent-sees

    def chosen(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of `environ` that the program gets."""
        more = (patterns for switches, patterns in self.when if any(map(environ.get, switches.split())))
        patterns = " ".join((_VARIABLES, self.variables, *more)).split()
        return {name: value for name, value in environ.items() if any(fnmatchcase(name, p) for p in patterns)}

    def files(self, environ: Mapping[str, str]) -> dict[str, Path]:
        """Return the paths of credential and settings, by name below HOME. The files need not exist."""
        return {name: self._source(name, environ) for name in (*self.credential.split(), *self.settings.split())}

    def copy_in(self, environ: Mapping[str, str], home: Path) -> bytes | None:
        """Copy the existing files to the new `home`. Returns the credential, None without one."""
        copied = dict[str, bytes]()
        for name, source in self.files(environ).items():
            if source.is_file() and source.stat().st_size <= MAX_BYTES:  # also behind a link
                copied[name] = source.read_bytes()
                (home / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_atomically(home / name, copied[name], mode=0o600)
        return copied.get(self.credential)

    def take_back(self, environ: Mapping[str, str], home: Path, before: bytes | None) -> tuple[str, ...]:
        """Replace the user's credential by the renewed one. Returns a note if that is refused.

        Call this when no process of the agent is left. `before`: the value of copy_in.
        """
        if before is None:
            return ()
        renewed, original = home / self.credential, self._source(self.credential, environ).resolve()
        try:
            if renewed.resolve() != home.resolve() / self.credential:
                raise ValueError("the path has a symbolic link")
            after = read_file(renewed, MAX_BYTES)
            if after == before:
                return ()
            if _keys(after) != _keys(before):
                raise ValueError("the keys differ")
            if original.read_bytes() != before:
                raise ValueError(f"{original} changed meanwhile")
            write_atomically(original, after, mode=0o600)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a link to itself
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            return (f"the agent's {self.credential} was not copied back: {reason}",)
        return ()

    def _source(self, name: str, environ: Mapping[str, str]) -> Path:
        for folder, variable in self.folders:
            if environ.get(variable) and Path(name).is_relative_to(folder):
                return Path(environ[variable]).expanduser() / Path(name).relative_to(folder)
        return home_of(environ) / name


def home_of(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or Path.home()).absolute()


def _keys(text: bytes) -> set[str]:
    return set(msgspec.json.decode(text, type=dict[str, Any]))


Places = dict[Path, tuple[str, ...]]

_SYSTEM = ("/usr", "/nix/store", "/gnu/store", "/home/linuxbrew/.linuxbrew")
# For loading libraries, name resolution and TLS. Other files of /etc may contain secrets.
_ETC = """
    ld.so.cache ld.so.conf ld.so.conf.d alternatives crypto-policies localtime services protocols
    resolv.conf hosts host.conf nsswitch.conf gai.conf ssl/certs ssl/cert.pem ssl/openssl.cnf
    pki/tls/certs pki/tls/cert.pem pki/tls/openssl.cnf pki/ca-trust/extracted ca-certificates/extracted
"""
_MAX_HEAD = 256  # bytes of the first line of a script
_MODULES = re.compile(r".*?/node_modules(?=/)")


def system_places() -> Places:
    """Return the read-only programs, libraries, name resolution and certificates of this machine."""
    places: Places = {}
    tops = (path for path in Path("/").iterdir() if path.name in ("bin", "sbin") or path.name.startswith("lib"))
    for path in (*map(Path, _SYSTEM), *tops):
        if path.is_dir():
            expose(path, places, ())
    for path in (Path("/etc", name) for name in _ETC.split()):
        if path.exists():  # /etc/resolv.conf is often a link into /run, which stays hidden
            places[path] = ("--ro-bind", os.fspath(path.resolve()))
    return places


def program_places(words: Sequence[str], search: str, places: Places, hidden: Sequence[Path]) -> Places:
    """Return `places`, the program in `words`, the files that it needs, and the files that `words` name.

    `search`: the user's PATH. Raises UsageError for a hidden file.
    """
    shown, program = dict(places), shutil.which(words[0], path=search)
    if program and Path(program).is_absolute():  # a relative path is in the clone
        for path in (Path(program), *_interpreter(Path(program), search)):
            for folder in (folder for step in _steps(path) for folder in _package(step)):
                # Neither the checkout's .venv nor a HOME that is a virtual environment.
                if not _is_below(folder, hidden) and folder / ".cache" not in hidden:
                    expose(folder, shown, hidden)
            expose(path, shown, hidden)
    for word in filter(_is_file, words[1:]):
        expose(Path(word), shown, hidden)
    return shown


def expose(path: Path, places: Places, hidden: Sequence[Path]) -> None:
    """Add a path and the symbolic links on the way to `places`. Raises UsageError if the path is hidden."""
    *links, real = _steps(path)
    if _is_below(real, hidden):
        fix = "Install it outside of the checkout, caches and data; or use --sandbox none."
        raise UsageError(f"the agent's {real} is in a folder that is hidden from agents", fix)
    added: Places = {link: ("--symlink", os.fspath(link.readlink())) for link in links}
    added[real] = ("--ro-bind", os.fspath(real))
    for place, option in added.items():
        tops = [top for top, bound in places.items() if bound[0] == "--ro-bind" and place.is_relative_to(top)]
        is_covered = _is_below(place, [path for path in hidden if _is_below(path, tops)])
        if place not in places and (is_covered or not tops):  # else a visible folder contains it
            places[place] = option


def cover(places: Places, hidden: Sequence[Path]) -> Places:
    """Return `places` with an empty folder in place of each hidden folder that they contain."""
    shown = [(place, option[1]) for place, option in places.items() if option[0] == "--ro-bind"]
    return places | {
        place / path.relative_to(source): ("--tmpfs",)
        for place, source in shown
        for path in hidden
        if path.is_relative_to(source) and os.access(path, os.F_OK) and path.is_dir()
    }


def _is_file(name: str) -> bool:
    return Path(name).is_absolute() and Path(name).is_file()


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _steps(path: Path) -> list[Path]:
    """Return the symbolic links on the way to a file, with resolved parents, and the resolved file."""
    links, real, parts = list[Path](), Path("/"), [*path.parts[1:]]
    while parts:
        step = Path(os.path.normpath(real / parts.pop(0)))
        if step.is_symlink():
            links.append(step)
            parts = [*step.readlink().parts, *parts]
        else:
            real = step
    return [*links, real]


def _package(path: Path) -> list[Path]:
    """Return the folders that a program needs: node_modules, virtual environment, /opt/NAME or Python's library."""
    if modules := _MODULES.match(os.fspath(path)):
        return [Path(modules[0])]
    top = path.parent.parent
    if (top / "pyvenv.cfg").is_file():
        return [top]
    if path.parts[1] == "opt" and len(path.parts) > 3:
        return [Path(*path.parts[:3])]
    return [*top.glob("lib/python3*"), *top.glob("lib/libpython*")] if path.name.startswith("python") else []


def _interpreter(program: Path, search: str) -> list[Path]:
    """Return the interpreter in the first line of a script. Programs that a shell script starts are not searched."""
    with suppress(OSError), program.open("rb") as file:
        head = os.fsdecode(file.read(_MAX_HEAD).partition(b"\n")[0])
        name, *words = head[2:].split() if head.startswith("#!") else [""]
        if Path(name).name == "env":
            names = [word for word in words if not word.startswith("-") and "=" not in word]
            name = shutil.which((names or [""])[0], path=search) or ""
        return [Path(name)] if _is_file(name) else []
    return []


HOME = Path("/agent")  # in bubblewrap; Codex does not keep its helpers below /tmp
_VARIABLES = """
    LANG LANGUAGE LC_ALL LC_CTYPE TERM USER LOGNAME
    HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
    SSL_CERT_FILE SSL_CERT_DIR NODE_EXTRA_CA_CERTS REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
"""
_DATA = ("NIGHTSHIFT_GSM8K", "NIGHTSHIFT_MATH", "HF_DATASETS_CACHE")
_CACHES = """
    HF_HOME HF_HUB_CACHE XDG_CACHE_HOME UV_CACHE_DIR TORCH_HOME TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR VLLM_CACHE_ROOT
    NIGHTSHIFT_PRIME_RL
"""
_ENTRY = (sys.executable, "-I", "-S", os.fspath(Path(__file__).with_name("enter.py")))
_TRIAL_SECONDS = 60.0  # a trial needs 0.3 s
_FIX = "SECURITY.md has the guarantees of each --sandbox; none isolates nothing."


def hidden_places(root: Path, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders that no agent may see: the checkout with .git, runs/ and .venv, caches and data."""
    home = home_of(environ)
    places = [root, root / ".git", root / "runs", root / ".venv", home / ".cache"]
    if (root / ".git").is_file():  # a linked worktree, or git init --separate-git-dir
        git_folder = root / (root / ".git").read_text().removeprefix("gitdir:").strip()
        places.append(git_folder)
        if (git_folder / "commondir").is_file():
            places.append(git_folder / (git_folder / "commondir").read_text().strip())
    places += [home] if home.is_relative_to("/usr") or home.is_relative_to("/opt") else []
    places += [Path(sys.prefix)] if sys.prefix != sys.base_prefix else []
    places += _folders_of((*_DATA, *_CACHES.split()), environ)
    return tuple(dict.fromkeys(path for place in places for path in (place.absolute(), place.resolve())))


def _folders_of(variables: Iterable[str], environ: Mapping[str, str]) -> list[Path]:
    return [Path(environ[name]).expanduser() for name in variables if environ.get(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Starts and ends an agent's processes. This base class is `--sandbox none`: nothing is isolated."""

    environ: Mapping[str, str]  # the user's
    login: Login = Login()
    hidden: tuple[Path, ...] = ()  # folders that the agent must not change, nor see in bubblewrap
    name: str = NO_SANDBOX  # in records
    warning: str = ""  # one line before a night

    def furnish(self, clone: Clone) -> bytes | None:
        """Prepare the folder of a new clone. Returns the credential that was copied into it, None without one."""
        return None

    def enclose(self, words: Sequence[str], clone: Clone) -> tuple[list[str], dict[str, str]]:
        """Return command line and environment that run `words` in the sandbox. Raises UsageError for a hidden file."""
        return [*words], dict(self.environ)

    def end(self) -> list[str]:
        """End the agent's processes and remove its files outside the clone. Returns the processes that are left."""
        return []

    def summary(self, agent: str) -> str:
        """Return one line with the variables and files that the agent gets; "" without a sandbox."""
        if self.name == NO_SANDBOX:
            return ""
        files = [os.fspath(path) for path in self.login.files(self.environ).values() if path.is_file()]
        given = [*sorted(self.login.chosen(self.environ)), *files, *self.login.sees]
        return f"{agent} gets of yours: {', '.join(given) or 'no variable and no file'}"

    def engine_variables(self) -> dict[str, str]:
        """Return variables that keep the temporary files of runs away from the agent."""
        return {}

    def trial(self, words: Sequence[str], clone: Clone) -> str | None:
        """Test the sandbox of `words` by a shell script (`_probe`). Returns the problem, None if there is none."""
        clone.make()
        try:
            clone.path.mkdir()
            clone.prompt.touch()
            self.furnish(clone)
            argv, variables = self.enclose(words, clone)
            command = [*argv[: -len(words)], "/bin/sh", "-c", *self._probe(words, clone)]
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
            done = subprocess.run(command, env=variables, cwd="/", timeout=_TRIAL_SECONDS, errors="replace", **options)
        except subprocess.TimeoutExpired:
            return f"no end within {_TRIAL_SECONDS:g} s"
        except OSError as error:
            return f"cannot be started: {error}"
        finally:
            self.end()
            clone.clear()
        last = done.stderr.strip().rpartition("\n")[2].removeprefix("bwrap: ")
        return None if done.returncode == 0 else last or f"exit code {done.returncode}"

    def _probe(self, words: Sequence[str], clone: Clone) -> list[str]:
        """Return a shell script that runs in the sandbox, its name and its arguments."""
        return ["true"]

    @property
    def _search(self) -> str:
        return self.environ.get("PATH", os.defpath)

    def _make_home(self, clone: Clone) -> bytes | None:
        for name in ("home", "tmp"):
            (clone.folder / name).mkdir(mode=0o700)
        return self.login.copy_in(self.environ, clone.folder / "home")

    def _variables(self, **inside: str) -> dict[str, str]:
        """Return the agent's environment, with times in UTC."""
        return {**self.login.chosen(self.environ), "SHELL": "/bin/sh", "TZ": "UTC", **inside}


# Without a user namespace, /proc/PID/root of any process of this user is a way out.
_ALWAYS = """
    --unshare-user --unshare-ipc --unshare-uts --unshare-cgroup-try --cap-drop ALL --die-with-parent --new-session
"""
# Names, options for namespaces and options for /proc, the strongest first. The second is equally strong, for bubblewrap
# before 0.8; the third is for containers that cover a part of /proc.
FORMS = (
    ("bwrap", ("--unshare-pid", "--disable-userns"), ("--proc",)),
    ("bwrap", ("--unshare-pid",), ("--proc",)),
    ("bwrap (the agent sees the names of other processes)", ("--unshare-pid",), ("--ro-bind", "/proc")),
)


def build_argv(bwrap: str, options: Sequence[str], places: Places, folder: Path) -> list[str]:
    """Return bubblewrap's command line without the words of the program, which runs in `folder`."""
    argv = [*_ENTRY, bwrap, *_ALWAYS.split(), *options]
    for place in sorted(places, key=lambda place: place.parts):  # parents first
        argv += [*places[place], os.fspath(place)]
    # Root outside may write to most of /proc/sys from any namespace.
    closed = [place for place, option in places.items() if option in (("--tmpfs",), ("--proc",))]
    for place in (*closed, Path("/")):
        argv += ["--remount-ro", os.fspath(place)]
    return [*argv, "--chdir", os.fspath(folder), "--"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap(Sandbox):
    """`--sandbox bwrap`: the agent sees a file system that consists of listed places."""

    bwrap: str
    options: tuple[str, ...]  # for namespaces
    proc: tuple[str, ...]  # the option for /proc

    def furnish(self, clone: Clone) -> bytes | None:
        """Create HOME, /tmp and the list of users in the folder of the clone."""
        (clone.folder / "passwd").write_text(f"agent:x:{os.getuid()}:{os.getgid()}::{HOME}:/bin/sh\n")
        return self._make_home(clone)

    def enclose(self, words: Sequence[str], clone: Clone) -> tuple[list[str], dict[str, str]]:
        places = self._places(words, clone)
        argv = build_argv(self.bwrap, self.options, places, clone.path)
        path = f"{self._search}:/usr/local/bin:/usr/bin:/bin"
        return [*argv, *words], self._variables(HOME=os.fspath(HOME), TMPDIR="/tmp", PATH=path)

    def _places(self, words: Sequence[str], clone: Clone) -> Places:
        places = program_places(words, self._search, system_places(), self.hidden)
        files = filter(_is_file, self.login.chosen(self.environ).values())  # certificates, keys
        seen = (name for name in files if not _is_below(Path(name).resolve(), self.hidden))
        for name in (*seen, *self.login.sees):
            expose(Path(name), places, self.hidden)
        writable = {HOME: "home", Path("/tmp"): "tmp", clone.path: "clone"}
        logs = clone.path / LOGS_NAME
        return cover(places, self.hidden) | {
            **{place: ("--bind", f"{clone.folder}/{name}") for place, name in writable.items()},
            **{path: ("--ro-bind", os.fspath(path)) for path in (clone.prompt, logs) if path.exists()},
            Path("/etc/passwd"): ("--ro-bind", f"{clone.folder}/passwd"),
            Path("/dev"): ("--dev",),
            Path("/proc"): self.proc,
        }


_UIDS = range(20_000, 40_000)
_SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")  # every user may write there
# Arguments are KIND:PATH. Everybody may write to uv's empty .lock files. The argument clone:PATH also refuses a `find`
# without -writable (BusyBox).
_REACH = """
writable() { find -H "$1" ! -type l ! -name .lock -writable -print -quit 2>/dev/null; }
wrong() { echo "uid $(id -u) $1" >&2; exit 1; }
for word; do
    path=${word#*:}
    case $word in
    clone:*) [ -n "$(writable "$path")" ] || wrong "cannot write to $path: set TMPDIR to a folder that all may enter";;
    needed:*) [ -r "$path" ] || wrong "cannot read $path: put it where every user may read, such as in /usr/local";;
    closed:*) if [ -r "$path" ] || [ -x "$path" ]; then wrong "can read $path: chmod go= $path"; fi;;
    above:*) if [ -w "$path" ] && [ ! -k "$path" ]; then wrong "can write to $path: chmod o-w $path"; fi;;
    kept:*) file=$(writable "$path"); [ -z "$file" ] || wrong "can write to $file: chmod -R o-w $path";;
    esac
done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherUser(Sandbox):
    """`--sandbox user`: the agent has another uid, which can neither change the checkout nor read runs/ or HOME.

    Only root can use this sandbox.
    """

    uid: int
    closed: tuple[Path, ...]  # folders that the agent must not enter, and files that it must not read

    def furnish(self, clone: Clone) -> bytes | None:
        """Create HOME and a temporary folder next to the clone, and give all three to the agent's uid."""
        before = self._make_home(clone)
        clone.folder.parent.chmod(0o711)
        os.chown(clone.folder, 0, self.uid)
        clone.folder.chmod(0o710)
        for path in clone.folder.rglob("*"):
            os.chown(path, self.uid, self.uid, follow_symlinks=False)
        return before

    def enclose(self, words: Sequence[str], clone: Clone) -> tuple[list[str], dict[str, str]]:
        inside = self._variables(
            PATH=self._search, HOME=f"{clone.folder}/home", TMPDIR=f"{clone.folder}/tmp", USER="agent", LOGNAME="agent"
        )
        return [*_ENTRY, *_as_user(self.uid), *words], inside

    def engine_variables(self) -> dict[str, str]:
        folder = Path(tempfile.gettempdir(), f"runs-of-nightshift-{os.getuid()}")
        make_private(folder)
        return {"TMPDIR": os.fspath(folder), "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}

    def end(self) -> list[str]:
        return end_user(self.uid)

    def _probe(self, words: Sequence[str], clone: Clone) -> list[str]:
        places = program_places(words, self._search, {}, ())
        given = self.login.chosen(self.environ).items()
        keys = [value for name, value in given if name not in _VARIABLES.split() and _is_file(value)]
        kept = (*self.hidden, Path(sysconfig.get_paths()["stdlib"]))  # read-only for the agent
        paths: dict[str, Iterable[object]] = {
            "clone": [clone.path],
            "needed": [*(p for p, option in places.items() if option[0] == "--ro-bind"), *self.login.sees, *keys],
            "closed": self.closed,
            "above": dict.fromkeys(parent for path in kept for parent in path.parents),
            "kept": [*kept, *self.login.sees, *filter(os.path.isabs, self._search.split(os.pathsep))],
        }
        return [_REACH, "sh", *(f"{kind}:{path}" for kind in paths for path in paths[kind])]


def _as_user(uid: int) -> list[str]:
    """Return the command that starts a program as `uid`, without groups, capabilities or a way to gain them."""
    setpriv = shutil.which("setpriv", path=os.defpath) or "setpriv"
    user = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    return [setpriv, *user, "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]


def _processes_of(uid: int) -> list[psutil.Process]:
    processes = list[psutil.Process]()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if uid in process.uids() and is_alive(process):
                processes.append(process)
    return processes


def end_user(uid: int) -> list[str]:
    """Kill all processes of an agent's uid and remove its files in shared folders. Returns the processes left."""
    deadline = time.monotonic() + KILL_SECONDS
    while left := _processes_of(uid):
        if time.monotonic() > deadline:
            return sorted(map(describe, left))
        kill = [*_as_user(uid), "/bin/sh", "-c", "kill -KILL -1"]  # all at once, so that no fork escapes
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(kill, capture_output=True, check=False, timeout=1.0)
        time.sleep(0.02)
    for folder in {tempfile.gettempdir(), *_SHARED}:
        for path in [*Path(folder).iterdir()] if os.access(folder, os.R_OK) else []:
            with suppress(OSError):  # other programs create and remove files there
                if path.lstat().st_uid == uid:
                    remove_tree(path)
    return []


def end_earlier(clone: Clone, note: Callable[[str], None]) -> None:
    """End the processes of a killed night's agent that had its own uid. Call as the controller."""
    uid = clone.folder.lstat().st_gid if clone.folder.is_dir() else 0
    if uid in _UIDS and os.getuid() == 0 and (left := end_user(uid)):
        note(f"processes of an earlier agent could not be ended: {', '.join(left)}")


def _free_uid(clone: Clone) -> int:
    """Return a uid that no user and no process of this machine has."""
    for step in range(len(_UIDS)):
        uid = _UIDS[(int(clone.folder.name, 16) + step) % len(_UIDS)]
        try:
            pwd.getpwuid(uid)
        except KeyError:
            if not _processes_of(uid):
                return uid
    raise UsageError(f"every uid from {_UIDS[0]} to {_UIDS[-1]} is taken", _FIX)


def _checked(sees: Iterable[str], hidden: Sequence[Path]) -> tuple[str, ...]:
    """Return the paths of --agent-sees. Raises UsageError for a missing path, or if a path contains a hidden one."""
    paths = [Path(name).expanduser().absolute() for name in sees]
    for path, place in product(paths, (*hidden, *map(Path, ("/proc", "/sys", "/dev", "/run")))):
        if not path.is_file() and not path.is_dir():
            raise UsageError(f"--agent-sees {path}: no such file or folder", "Give a path that exists.")
        names = [path, Path(os.path.realpath(path))]
        if any(_is_below(name, [place]) for name in names) or _is_below(place, names):
            raise UsageError(
                f"--agent-sees {path} would show {place}, which no agent may see", "Copy the files elsewhere."
            )
    return tuple(map(os.fspath, paths))


def choose(
    setting: str, words: Sequence[str], login: Login, root: Path, environ: Mapping[str, str], clone: Clone
) -> Sandbox:
    """Return the sandbox of --sandbox, after a trial with `words`. `auto`: the first sandbox that works.

    Raises:
        UsageError: the sandbox does not work here, or `words` or --agent-sees name a hidden path.
    """
    hidden = hidden_places(root, environ)
    login = replace(login, sees=_checked(login.sees, (*hidden, clone.folder.parent)))
    given: dict[str, Any] = {"environ": environ, "login": login, "hidden": hidden}
    causes = list[str]()
    for name, build in {"bwrap": _bubblewraps, "user": _other_users}.items():
        if setting in ("auto", name):
            candidates, cause = build(root, clone, given)
            for sandbox in (s for s in candidates if setting == "auto" or s.name == name):
                problem = sandbox.trial(words, clone)
                if problem is None:
                    causes += [f"{name}: {cause}"] if sandbox.name != name else []
                    after = f"sandbox: {sandbox.name}, because {'; '.join(causes)}" if causes else ""
                    return replace(sandbox, warning=after)
                cause = problem
            causes.append(f"{name}: {cause}")
    if setting not in ("auto", NO_SANDBOX):
        raise UsageError(f"--sandbox {causes[0]}", _FIX)
    means = "it has your rights, so it can change code, records and scores, and read your files (SECURITY.md)"
    return Sandbox(environ=environ, warning=f"agent: not isolated: {means}; {'; '.join(causes) or '--sandbox none'}")


def _bubblewraps(root: Path, clone: Clone, given: Mapping[str, Any]) -> tuple[list[Sandbox], str]:
    """Return the forms of bubblewrap, the strongest first, or the cause why none works."""
    bwrap = shutil.which("bwrap", path=os.defpath) or shutil.which("bwrap")
    if bwrap is None:
        return [], "no program bwrap on PATH"
    return [Bubblewrap(**given, name=name, bwrap=bwrap, options=o, proc=proc) for name, o, proc in FORMS], ""


def _other_users(root: Path, clone: Clone, given: Mapping[str, Any]) -> tuple[list[Sandbox], str]:
    """Return the sandbox with another uid, or the cause why it does not work."""
    home = home_of(given["environ"])
    if os.getuid() != 0:
        return [], "only root can start a process as another user"
    if shutil.which("setpriv", path=os.defpath) is None:
        return [], f"no program setpriv (util-linux) in {os.defpath}"
    if home == Path("/"):
        return [], "HOME is /: set it to a folder that no other user may enter"
    # .git/config may contain a token. git and the ledger keep these rights when they rewrite the files.
    secrets = [root / "results.tsv", *(place / "config" for place in given["hidden"] if (place / "HEAD").is_file())]
    closed = [path for path in (root / "runs", *secrets) if path.exists()]
    for path in closed:
        path.chmod(path.stat().st_mode & 0o700)
    cache = Path(given["environ"].get("XDG_CACHE_HOME") or home / ".cache")
    closed += [home, cache / "nightshift", *_folders_of(_DATA, given["environ"])]
    return [OtherUser(**given, name="user", uid=_free_uid(clone), closed=tuple(closed))], ""
