"""The sandbox of an agent: bubblewrap; another uid if bubblewrap cannot run; or none. SECURITY.md has the limits.

bubblewrap shows the clone, a new HOME, an empty /tmp, the agent's program, the system's programs and libraries, and a
few named variables and files (`Places`, `Login`). Hidden folders in visible folders appear as empty folders. With
another uid, a script tests the limits before the night.
"""

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import count, product
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil

from nightshift.agents.clone import LOGS_NAME, Clone, make_private
from nightshift.campaign.records import NO_SANDBOX
from nightshift.errors import UsageError
from nightshift.executors.process import KILL_SECONDS, describe, is_alive
from nightshift.files import cache_dir, parse_json, read_file, remove_tree, write_atomically

_MAX_CREDENTIAL = 1_000_000  # bytes; a login has a few thousand

Environ = Mapping[str, str]  # environment variables


@dataclass(frozen=True)
class Login:
    """The user's variables and files that an agent's program needs. Spaces separate the names in a string."""

    variables: str = ""  # patterns of environment variables
    credential: str = ""  # file below HOME with tokens that the program renews; the only file that is copied back
    settings: str = ""  # other files below HOME
    folders: tuple[tuple[str, str], ...] = ()  # a folder below HOME, and the variable that names another path for it
    when: tuple[tuple[str, str], ...] = ()  # if any of these variables is set: more patterns for `variables`
    sees: tuple[str, ...] = ()  # the paths that --agent-sees names

    def chosen(self, environ: Environ) -> dict[str, str]:
        """Return the variables of `environ` that the program gets."""
        conditional = (patterns for names, patterns in self.when if any(map(environ.get, names.split())))
        patterns = " ".join((_COMMON_VARIABLES, self.variables, *conditional)).split()
        return {name: value for name, value in environ.items() if any(fnmatchcase(name, p) for p in patterns)}

    def files(self, environ: Environ) -> dict[str, Path]:
        """Return the paths of the user's files by their names in `credential` and `settings`. A file may be missing."""
        return {name: self._source(name, environ) for name in f"{self.credential} {self.settings}".split()}

    def copy_in(self, environ: Environ, home: Path) -> bytes | None:
        """Copy the user's files to the agent's `home`. Returns the credential, if any."""
        copied = {name: path.read_bytes() for name, path in self.files(environ).items() if path.is_file()}
        for name, data in copied.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(home / name, data, mode=0o600)
        return copied.get(self.credential)

    def take_back(self, environ: Environ, home: Path, before: bytes | None) -> tuple[str, ...]:
        """Copy a renewed credential back to the user's file. Returns a note if Nightshift refuses to copy it. Call this
        after the agent's processes have ended. `before`: the value that `copy_in` returned."""
        if before is None:
            return ()
        renewed, original = home / self.credential, self._source(self.credential, environ).resolve()
        try:
            if Path(os.path.realpath(renewed)) != home.resolve() / self.credential:
                raise ValueError("its path contains a symbolic link")
            after = read_file(renewed, _MAX_CREDENTIAL)
            if after != before:
                if parse_json(after, dict[str, Any]).keys() != parse_json(before, dict[str, Any]).keys():
                    raise ValueError("the keys differ")
                if original.read_bytes() != before:
                    raise ValueError(f"{original} changed while the agent ran")
                write_atomically(original, after, mode=0o600)
        except (OSError, ValueError) as error:
            return (f"the agent's {self.credential} was not copied back: {error}",)
        return ()

    def _source(self, name: str, environ: Environ) -> Path:
        for folder, variable in self.folders:
            if environ.get(variable) and Path(name).is_relative_to(folder):
                return Path(environ[variable]).expanduser() / Path(name).relative_to(folder)
        return home_of(environ) / name


def home_of(environ: Environ) -> Path:
    return Path(environ.get("HOME") or Path.home()).absolute()


Places = dict[Path, tuple[str, ...]]  # path in the sandbox -> the option of bubblewrap that makes it, and its source

_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/nix/store", "/gnu/store", "/home/linuxbrew/.linuxbrew")
# The files of /etc for libraries, name resolution and TLS. Other files of /etc may contain secrets.
_ETC_FILES = """
    ld.so.cache ld.so.conf ld.so.conf.d alternatives crypto-policies localtime services protocols
    resolv.conf hosts host.conf nsswitch.conf gai.conf ssl/certs ssl/cert.pem ssl/openssl.cnf
    pki/tls/certs pki/tls/cert.pem pki/tls/openssl.cnf pki/ca-trust/extracted ca-certificates/extracted
"""


def system_places() -> Places:
    """Return this machine's read-only files that every agent sees: programs, libraries, certificates, resolv.conf."""
    places: Places = {}
    for path in (*map(Path, _SYSTEM_FOLDERS), *Path("/").glob("lib*")):
        if path.is_dir():
            expose(path, places, ())
    for path in (Path("/etc", name) for name in _ETC_FILES.split()):
        if path.exists():  # /etc/resolv.conf is often a link into /run, which stays hidden
            places[path] = ("--ro-bind", f"{path.resolve()}")
    return places


def program_places(words: Sequence[str], search: str, places: Places, hidden: Sequence[Path]) -> Places:
    """Return `places` with the agent's program, its interpreter and package, and the files among its arguments.
    `search`: the user's PATH. Raises UsageError if one of the files is hidden."""
    extended, program = dict(places), Path(shutil.which(words[0], path=search) or "")
    files = [program, *_interpreter(program, search)] if program.is_absolute() else []  # a relative path: in the clone
    for folder in (folder for path in files for step in _resolve_steps(path) for folder in _package_folders(step)):
        if not _is_within(folder, hidden):  # such as the checkout's .venv
            expose(folder, extended, hidden)
    for path in (*files, *map(Path, filter(_is_absolute_file, words[1:]))):
        expose(path, extended, hidden)
    return extended


def expose(path: Path, places: Places, hidden: Sequence[Path]) -> None:
    """Add a path, and the symbolic links that lead to it, to `places`. Raises UsageError if the path is hidden."""
    *links, real = _resolve_steps(path)
    if _is_within(real, hidden):
        fix = "Move the file out of the checkout, caches and data; or use --sandbox none."
        raise UsageError(f"the agent needs {real}, which is in a folder that is hidden from agents", fix)
    visible = [place for place, option in places.items() if option[0] == "--ro-bind"]
    for link in links:
        if not _is_within(link, visible):
            places[link] = ("--symlink", f"{link.readlink()}")
    if not _is_within(real, visible):
        places[real] = ("--ro-bind", f"{real}")


def cover(places: Places, hidden: Sequence[Path]) -> Places:
    """Return `places` and an empty folder over each hidden folder that is inside a visible folder."""
    visible = [(place, option[1]) for place, option in places.items() if option[0] == "--ro-bind"]
    return places | {
        place / path.relative_to(source): ("--tmpfs",)
        for (place, source), path in product(visible, hidden)
        if path.is_relative_to(source) and path.is_dir()
    }


def _is_absolute_file(name: str) -> bool:
    return Path(name).is_absolute() and Path(name).is_file()


def _is_within(path: Path, folders: Iterable[Path]) -> bool:
    return any(map(path.is_relative_to, folders))


def _resolve_steps(path: Path) -> list[Path]:
    """Return the symbolic links that lead from a path to the real file, and as the last item the real file."""
    links, real, parts = list[Path](), Path("/"), [*path.parts[1:]]
    while parts:
        step = Path(os.path.normpath(real / parts.pop(0)))
        if step.is_symlink():
            links.append(step)
            parts = [*step.readlink().parts, *parts]
        else:
            real = step
    return [*links, real]


def _package_folders(path: Path) -> list[Path]:
    """Return the node_modules, virtual environment or else Python library that a program belongs to."""
    top = path.parent.parent
    if modules := re.match(r".*?/node_modules(?=/)", f"{path}"):
        return [Path(modules[0])]
    if (top / "pyvenv.cfg").is_file():
        return [top]
    return [*top.glob("lib/python3*"), *top.glob("lib/libpython*")] if path.name.startswith("python") else []


def _interpreter(program: Path, search: str) -> list[Path]:
    """Return the interpreter in a script's first line, if any. Other programs that the script starts are not found."""
    with program.open("rb") as file:
        head = os.fsdecode(file.readline(256))
    words = [word for word in head[2:].split() if Path(word).name != "env" and not word.startswith("-")]
    path = shutil.which(words[0], path=search) if head.startswith("#!") and words else None
    return [Path(path)] if path else []


HOME = Path("/agent")  # the agent's HOME in bubblewrap; not below /tmp, where Codex refuses to keep its helper programs
_COMMON_VARIABLES = """
    LANG LANGUAGE LC_ALL LC_CTYPE TERM USER LOGNAME
    HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
    SSL_CERT_FILE SSL_CERT_DIR NODE_EXTRA_CA_CERTS REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
"""
_DATA_VARIABLES = ("NIGHTSHIFT_GSM8K", "NIGHTSHIFT_MATH", "HF_DATASETS_CACHE")
_CACHE_VARIABLES = """
    HF_HOME HF_HUB_CACHE XDG_CACHE_HOME UV_CACHE_DIR TORCH_HOME TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR VLLM_CACHE_ROOT
    NIGHTSHIFT_PRIME_RL
"""
_ENTRY = (sys.executable, "-I", "-S", str(Path(__file__).with_name("enter.py")))


def hidden_places(root: Path, environ: Environ) -> tuple[Path, ...]:
    """Return the folders that no agent may see: the checkout with .git, runs/ and .venv, caches and data."""
    git, home = root / ".git", home_of(environ)
    places = [root, git, root / "runs", root / ".venv", home / ".cache"]
    places += [home] if home.is_relative_to("/usr") else []  # visible otherwise
    if git.is_file():  # a linked worktree, or git init --separate-git-dir
        folder = root / git.read_text().removeprefix("gitdir:").strip()
        places.append(folder.parents[1] if folder.parent.name == "worktrees" else folder)
    places += [Path(sys.prefix)] if sys.prefix != sys.base_prefix else []
    places += _folders_of((*_DATA_VARIABLES, *_CACHE_VARIABLES.split()), environ)
    return tuple(dict.fromkeys(path for place in places for path in (place.absolute(), place.resolve())))


def _folders_of(variables: Iterable[str], environ: Environ) -> list[Path]:
    return [Path(environ[name]).expanduser() for name in variables if environ.get(name)]


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Isolates an agent's processes and ends them. This base class is `--sandbox none`, which isolates nothing."""

    environ: Environ  # the user's environment variables
    login: Login = Login()
    hidden: tuple[Path, ...] = ()  # folders that bubblewrap hides, and that another uid must not change
    name: str = NO_SANDBOX  # the name that records store
    warning: str = ""  # a line that is printed before a night
    problem: str | None = None  # why this machine cannot run it, known before the test

    def furnish(self, clone: Clone) -> bytes | None:
        """Prepare the folder of a new clone. Returns the credential's bytes if a credential was copied, else None."""
        return None

    def enclose(self, words: Sequence[str], clone: Clone) -> tuple[list[str], dict[str, str]]:
        """Return the command line that runs `words`, and its environment. Raises UsageError for a hidden file."""
        return [*words], dict(self.environ)

    def end(self) -> list[str]:
        """End the agent's processes and remove its files outside the clone. Returns the processes that are left."""
        return []

    def summary(self, agent: str) -> str:
        """Return a line that names the user's variables and files that the agent gets; "" without a sandbox."""
        files = (f"{path}" for path in self.login.files(self.environ).values() if path.is_file())
        names = *sorted(self.login.chosen(self.environ)), *files, *self.login.sees
        return "" if self.name == NO_SANDBOX else f"your variables and files that {agent} gets: {', '.join(names)}"

    def engine_variables(self) -> dict[str, str]:
        """Return variables that keep the temporary files of runs away from the agent."""
        return {}

    def trial(self, words: Sequence[str], clone: Clone) -> str | None:
        """Run _REACH in the sandbox of `words`. Returns the problem; None if there is none."""
        clone.make()
        try:
            clone.path.mkdir()
            clone.prompt.touch()
            self.furnish(clone)
            argv, variables = self.enclose(words, clone)
            command = [*argv[: -len(words)], "/bin/sh", "-c", _REACH, "sh", *self._limits(words, clone)]
            with clone.prompt.open() as stdin:
                done = subprocess.run(command, env=variables, cwd="/", timeout=60.0, stdin=stdin, stderr=PIPE)
        finally:
            self.end()
            clone.clear()
        last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("bwrap: ")
        return None if done.returncode == 0 else last_line or f"exit code {done.returncode}"

    def _limits(self, words: Sequence[str], clone: Clone) -> list[str]:
        """Return the arguments of _REACH, which fails if the agent could reach too much."""
        return []

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


# Without a user namespace, the agent could leave the sandbox through /proc/PID/root of any process of this user.
_ALWAYS = """
    --unshare-user --unshare-ipc --unshare-uts --unshare-cgroup-try --cap-drop ALL --die-with-parent --new-session
"""
# Name, options for namespaces and option for /proc, in the order of the attempts. The first form needs bubblewrap 0.8.
# The second form is as strong. The third form is weaker, for containers that cover a part of /proc.
FORMS = (
    ("bwrap", ("--unshare-pid", "--disable-userns"), ("--proc",)),
    ("bwrap", ("--unshare-pid",), ("--proc",)),
    ("bwrap (the agent sees the names of other processes)", ("--unshare-pid",), ("--ro-bind", "/proc")),
)


@dataclass(frozen=True, kw_only=True)
class Bubblewrap(Sandbox):
    """`--sandbox bwrap`: the agent sees a file system that contains only the paths of `_places`."""

    bwrap: str
    options: tuple[str, ...]  # for namespaces
    proc: tuple[str, ...]  # the option for /proc

    def furnish(self, clone: Clone) -> bytes | None:
        """Create the agent's HOME, /tmp and /etc/passwd in the folder of the clone."""
        (clone.folder / "passwd").write_text(f"agent:x:{os.getuid()}:{os.getgid()}::{HOME}:/bin/sh\n")
        return self._make_home(clone)

    def enclose(self, words: Sequence[str], clone: Clone) -> tuple[list[str], dict[str, str]]:
        places, argv = self._places(words, clone), [*_ENTRY, self.bwrap, *_ALWAYS.split(), *self.options]
        for place in sorted(places, key=lambda place: place.parts):  # parents first
            argv += [*places[place], f"{place}"]
        # /proc too: if root starts the night, the agent could otherwise write to most of /proc/sys.
        read_only = [place for place, option in places.items() if option in (("--tmpfs",), ("--proc",))]
        for place in (*read_only, Path("/")):
            argv += ["--remount-ro", f"{place}"]
        path = f"{self._search}:/usr/local/bin:/usr/bin:/bin"
        variables = self._variables(HOME=f"{HOME}", TMPDIR="/tmp", PATH=path)
        return [*argv, "--chdir", f"{clone.path}", "--", *words], variables

    def _places(self, words: Sequence[str], clone: Clone) -> Places:
        places = program_places(words, self._search, system_places(), self.hidden)
        files = filter(_is_absolute_file, self.login.chosen(self.environ).values())  # such as a variable's certificate
        for name in (*files, *self.login.sees):
            expose(Path(name), places, self.hidden)
        writable = {HOME: "home", Path("/tmp"): "tmp", clone.path: "clone"}
        return cover(places, self.hidden) | {
            **{place: ("--bind", f"{clone.folder}/{name}") for place, name in writable.items()},
            clone.prompt: ("--ro-bind", f"{clone.prompt}"),
            clone.path / LOGS_NAME: ("--ro-bind-try", f"{clone.path}/{LOGS_NAME}"),
            Path("/etc/passwd"): ("--ro-bind", f"{clone.folder}/passwd"),
            Path("/dev"): ("--dev",),
            Path("/proc"): self.proc,
        }


_UIDS = range(20_000, 40_000)
_SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")  # every user may write there
# Each argument is KIND:PATH. uv makes empty .lock files that every user may write to.
_REACH = """
writable() { find -H "$1" ! -type l ! -name .lock -writable -print -quit 2>/dev/null; }
fail() { echo "uid $(id -u) $1" >&2; exit 1; }
for argument; do
    path=${argument#*:}
    case $argument in
    clone:*) [ -n "$(writable "$path")" ] || fail "cannot write to $path: set TMPDIR to a folder that all can enter";;
    needed:*) [ -r "$path" ] || fail "cannot read $path: put it where every user may read, such as in /usr/local";;
    closed:*) if [ -r "$path" ] || [ -x "$path" ]; then fail "can read $path: chmod go= $path"; fi;;
    above:*) if [ -w "$path" ] && [ ! -k "$path" ]; then fail "can write to $path: chmod o-w $path"; fi;;
    read-only:*) file=$(writable "$path"); [ -z "$file" ] || fail "can write to $file: chmod -R o-w $path";;
    esac
done
"""


@dataclass(frozen=True, kw_only=True)
class OtherUser(Sandbox):
    """`--sandbox user`: the agent is another user, who can neither change the checkout nor read runs/ or HOME."""

    uid: int
    closed: tuple[Path, ...]  # folders that the agent must not enter, and files that it must not read

    def furnish(self, clone: Clone) -> bytes | None:
        """Create HOME and a temporary folder next to the clone. The agent's uid owns the clone and both folders."""
        before = self._make_home(clone)
        clone.folder.parent.chmod(0o711)
        os.chown(clone.folder, 0, self.uid)
        clone.folder.chmod(0o710)
        for path in clone.folder.rglob("*"):
            os.chown(path, self.uid, self.uid, follow_symlinks=False)
        return before

    def enclose(self, words: Sequence[str], clone: Clone) -> tuple[list[str], dict[str, str]]:
        folders = {"HOME": f"{clone.folder}/home", "TMPDIR": f"{clone.folder}/tmp"}
        variables = self._variables(PATH=self._search, USER="agent", LOGNAME="agent", **folders)
        return [*_ENTRY, *_as_user(self.uid), *words], variables

    def engine_variables(self) -> dict[str, str]:
        folder = Path(tempfile.gettempdir(), f"runs-of-nightshift-{os.getuid()}")
        make_private(folder)
        return {"TMPDIR": f"{folder}", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}

    def end(self) -> list[str]:
        return end_user(self.uid)

    def _limits(self, words: Sequence[str], clone: Clone) -> list[str]:
        program = program_places(words, self._search, {}, ()).items()
        return [
            f"clone:{clone.path}",
            *(f"needed:{path}" for path, option in program if option[0] == "--ro-bind"),
            *(f"closed:{path}" for path in self.closed),
            *{f"above:{parent}" for path in self.hidden for parent in path.parents},
            *(f"read-only:{path}" for path in self.hidden),
            *(f"{kind}:{path}" for path in self.login.sees for kind in ("needed", "read-only")),
        ]


def _as_user(uid: int) -> list[str]:
    """Return the command that starts a program as `uid`. The program has no groups and can gain no capabilities."""
    setpriv = shutil.which("setpriv", path=os.defpath) or "setpriv"
    user = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    return [setpriv, *user, "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]


def _processes_of(uid: int) -> list[psutil.Process]:
    processes = psutil.process_iter(["uids"])
    return [process for process in processes if uid in (process.info["uids"] or ()) and is_alive(process)]


def end_user(uid: int) -> list[str]:
    """Kill all processes of an agent's uid and remove its files in shared folders. Returns processes that remain."""
    deadline = time.monotonic() + KILL_SECONDS
    while left := _processes_of(uid):
        if time.monotonic() > deadline:
            return sorted(map(describe, left))
        kill = [*_as_user(uid), "/bin/sh", "-c", "kill -KILL -1"]  # all at once, so that no fork escapes
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(kill, capture_output=True, check=False, timeout=1.0)
        time.sleep(0.02)
    for folder in {tempfile.gettempdir(), *_SHARED}:
        for path in [*Path(folder).glob("*")]:
            with suppress(OSError):  # other programs create and remove files there
                if path.lstat().st_uid == uid:
                    remove_tree(path)
    return []


def end_earlier(clone: Clone, note: Callable[[str], None]) -> None:
    """End the processes that an agent with its own uid left when its night was killed. Needs the controller's lock."""
    uid = clone.folder.lstat().st_gid if clone.folder.is_dir() else 0
    if uid in _UIDS and os.getuid() == 0 and (left := end_user(uid)):
        note(f"processes of an earlier agent could not be ended, kill them by hand: {', '.join(left)}")


def _free_uid(clone: Clone) -> int:
    """Return a uid that no user and no process of this machine has."""
    for number in count(int(clone.folder.name, 16)):  # two checkouts begin with different uids
        uid = _UIDS[number % len(_UIDS)]
        try:
            pwd.getpwuid(uid)
        except KeyError:
            if not _processes_of(uid):
                break
    return uid


def _check_sees(sees: Iterable[str], hidden: Sequence[Path]) -> tuple[str, ...]:
    """Return the paths of --agent-sees. Raises UsageError if a path is missing, or would show a hidden path."""
    paths = [Path(name).expanduser().absolute() for name in sees]
    for path in paths:
        if not path.exists():
            raise UsageError(f"--agent-sees {path}: no such file or folder", "Give a path that exists.")
        for name, place in product((path, path.resolve()), (*hidden, *map(Path, ("/proc", "/sys", "/dev", "/run")))):
            if name.is_relative_to(place) or place.is_relative_to(name):
                cause = f"--agent-sees {path} would show {place}, which no agent may see"
                raise UsageError(cause, "Name a copy in another folder.")
    return tuple(map(str, paths))


def choose(setting: str, words: Sequence[str], login: Login, root: Path, environ: Environ, clone: Clone) -> Sandbox:
    """Return the sandbox that --sandbox names (`setting`), after a test. `auto`: the first sandbox that works. Raises
    UsageError if the sandbox does not work here, or `words` or --agent-sees names a hidden path."""
    hidden = hidden_places(root, environ)
    login = replace(login, sees=_check_sees(login.sees, (*hidden, clone.folder.parent)))
    causes = dict[str, str]()
    for sandbox in _candidates(setting, root, clone, {"environ": environ, "login": login, "hidden": hidden}):
        if setting in ("auto", sandbox.name):
            name, problem = sandbox.name.partition(" ")[0], sandbox.problem or sandbox.trial(words, clone)
            if problem is None:
                causes.pop(sandbox.name, None)
                reasons = "; ".join(causes.values())
                return replace(sandbox, warning=f"sandbox: {sandbox.name}, because {reasons}" if reasons else "")
            causes[name] = f"{name}: {problem}"
    reasons = "; ".join(causes.values())
    if setting not in ("auto", NO_SANDBOX):
        fix = "SECURITY.md lists the guarantees of each --sandbox. With --sandbox none, nothing is isolated."
        raise UsageError(f"--sandbox {reasons}", fix)
    warning = "agent: not isolated: it has your rights, so it can change code, records and scores, and read your files"
    return Sandbox(environ=environ, warning=f"{warning} (SECURITY.md); {reasons or '--sandbox none'}")


def _candidates(setting: str, root: Path, clone: Clone, fields: Mapping[str, Any]) -> Iterator[Sandbox]:
    """Yield the sandboxes in the order of the attempts."""
    if bwrap := shutil.which("bwrap", path=os.defpath) or shutil.which("bwrap"):
        for name, options, proc in FORMS:
            yield Bubblewrap(**fields, name=name, bwrap=bwrap, options=options, proc=proc)
    else:
        yield Sandbox(**fields, name="bwrap", problem="no program bwrap on PATH")
    if setting in ("auto", "user"):
        yield _other_user(root, clone, fields)


def _other_user(root: Path, clone: Clone, fields: Mapping[str, Any]) -> Sandbox:
    """Return the sandbox with another uid. Makes runs/ and `secrets` private."""
    if os.getuid() != 0 or shutil.which("setpriv", path=os.defpath) is None:
        problem = f"it needs root, and the program setpriv (util-linux) in {os.defpath}"
        return Sandbox(**fields, name="user", problem=problem)
    # .git/config may contain a token. git and the ledger keep the file modes (chmod below) when they rewrite the files.
    secrets = [root / "results.tsv", *(place / "config" for place in fields["hidden"] if (place / "HEAD").is_file())]
    closed = [path for path in (root / "runs", *secrets) if path.exists()]
    for path in closed:
        path.chmod(path.stat().st_mode & 0o700)
    closed += [
        home_of(fields["environ"]),
        cache_dir(fields["environ"]),
        *_folders_of(_DATA_VARIABLES, fields["environ"]),
    ]
    return OtherUser(**fields, name="user", uid=_free_uid(clone), closed=tuple(closed))
