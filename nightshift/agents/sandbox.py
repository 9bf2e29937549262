"""The OS wall around an agent: bubblewrap, where this machine has it.

Inside are the clone, an empty HOME and an empty /tmp, all writable; the agent's program, the system's programs and
libraries, the network and a few named variables. Nothing else of this machine is: no checkout, runs/, cache, data,
HOME, socket or other process. What may be seen is listed (`Places`, `Login`); what must not be and lies in something
listed, such as a checkout in /usr/src, is covered. Before a night the very command line is tried, and looks for it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from nightshift.agents import sandbox_entry
from nightshift.agents.clone import EVIDENCE_NAME, Clone
from nightshift.errors import UsageError
from nightshift.files import read_file, write_atomically
from nightshift.signals import unblocked

MAX_BYTES = 1_000_000  # of a file that is copied: they have some thousand


@dataclass(frozen=True, slots=True)
class Login:
    """What a program needs of the person: variables (patterns of names), and files of a folder.

    `folder`: its name in HOME, and the variable that may name another. `credential` holds tokens that the program
    renews: the one file that is taken back.
    """

    variables: tuple[str, ...] = ()
    folder: tuple[str, str] = ("", "")
    credential: str = ""
    settings: tuple[str, ...] = ()

    def copy_in(self, environ: Mapping[str, str], home: Path) -> bytes | None:
        """Copy what there is of it below the new `home`; the credential as it was."""
        copied = dict[str, bytes]()
        for name in filter(None, (self.credential, *self.settings)):
            source, target = self._source(environ) / name, home / self.folder[0] / name
            if source.is_file() and source.stat().st_size <= MAX_BYTES:  # people link them from elsewhere
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                copied[name] = source.read_bytes()
                target.touch(mode=0o600)
                target.write_bytes(copied[name])
        return copied.get(self.credential)

    def take_back(self, environ: Mapping[str, str], home: Path, before: bytes | None) -> tuple[str, ...]:
        """Replace the person's credential by the agent's, whole; a note where it is not what it should be.

        Call it when no process of the agent is left. `before`: what copy_in gave.
        """
        if before is None:
            return ()
        there, own = home / self.folder[0] / self.credential, (self._source(environ) / self.credential).resolve()
        try:
            if there.resolve() != home.resolve() / self.folder[0] / self.credential:
                raise ValueError("it is behind a link")
            after = read_file(there, MAX_BYTES)
            if after == before:
                return ()
            if _keys(after) != _keys(before):
                raise ValueError("its keys are others")
            if own.read_bytes() != before:
                raise ValueError(f"{own} has changed meanwhile")
            write_atomically(own, after, mode=0o600)
        except (OSError, ValueError, RuntimeError) as error:  # of a link that leads to itself
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            return (f"the {self.credential} that it left was not taken back: {reason}",)
        return ()

    def _source(self, environ: Mapping[str, str]) -> Path:
        name, variable = self.folder
        return Path(environ[variable]).expanduser() if environ.get(variable) else home_of(environ) / name


def home_of(environ: Mapping[str, str]) -> Path:
    """The person's home folder."""
    return Path(environ.get("HOME") or Path.home()).absolute()


def _keys(text: bytes) -> set[str]:
    return set(msgspec.json.decode(text, type=dict[str, Any]))


Places = dict[Path, tuple[str, ...]]

_SYSTEM = ("/usr", "/nix/store", "/gnu/store", "/home/linuxbrew/.linuxbrew")
# What programs need to load, to find a host and to trust it; of /etc nothing else, which may hold secrets.
_ETC = """
    ld.so.cache ld.so.conf ld.so.conf.d alternatives crypto-policies localtime services protocols
    resolv.conf hosts host.conf nsswitch.conf gai.conf ssl/certs ssl/cert.pem ssl/openssl.cnf
    pki/tls/certs pki/tls/cert.pem pki/tls/openssl.cnf pki/ca-trust/extracted ca-certificates/extracted
"""
_MAX_HEAD = 256  # bytes of a script in which its interpreter stands


def system_places() -> Places:
    """Programs, libraries, name resolution and certificates of this machine, to read."""
    places: Places = {Path(name): ("--ro-bind", name) for name in _SYSTEM if Path(name).is_dir()}
    for path in Path("/").iterdir():
        if path.name in ("bin", "sbin") or path.name.startswith("lib"):
            places[path] = (
                ("--symlink", os.fspath(path.readlink())) if path.is_symlink() else ("--ro-bind", os.fspath(path))
            )
    for path in (Path("/etc", name) for name in _ETC.split()):
        if path.exists():  # /etc/resolv.conf is often a link into /run: its file, and nothing else of it
            places[path] = ("--ro-bind", os.fspath(path.resolve()))
    return places


def program_places(words: Sequence[str], search: str, places: Places, hidden: Sequence[Path]) -> Places:
    """`places`, with the program that `words` begin with, its interpreter and package, and the files that they name.

    `search`: the person's PATH. UsageError if one of them is hidden.
    """
    found, program = dict(places), shutil.which(words[0], path=search)
    waiting = [Path(program)] if program and Path(program).is_absolute() else []  # any other lies in the clone
    seen = set[Path]()
    while waiting:
        steps = _steps(waiting.pop())
        for folder in [folder for step in steps for folder in _package(step)]:
            # Not the checkout's .venv; nor a HOME in which somebody made an environment.
            if not _is_below(folder, hidden) and folder / ".cache" not in hidden:
                found |= {} if is_shown(folder, found, hidden) else {folder: ("--ro-bind", os.fspath(folder))}
        found |= expose(steps, found, hidden)
        waiting += _interpreter(steps[-1], search) if steps[-1] not in seen else []
        seen.add(steps[-1])
    for word in words[1:]:
        if _is_file(word):
            found |= expose(_steps(Path(word)), found, hidden)
    return found


def file_places(files: Iterable[str], places: Places, hidden: Sequence[Path]) -> Places:
    """`places`, with these files, as far as they are there and not hidden."""
    found = dict(places)
    for name in files:
        if _is_file(name) and not _is_below(Path(name).resolve(), hidden):
            found |= expose(_steps(Path(name)), found, hidden)
    return found


def expose(steps: Sequence[Path], places: Places, hidden: Sequence[Path]) -> Places:
    """The links that lead to a file, and the file. UsageError if it is hidden."""
    *links, real = steps
    if _is_below(real, hidden):
        raise UsageError(
            f"the agent's {real} lies where no agent may look", "Install it in a folder of its own; or --sandbox none."
        )
    found: Places = {link: ("--symlink", os.fspath(link.readlink())) for link in links}
    found[real] = ("--ro-bind", os.fspath(real))
    return {path: option for path, option in found.items() if path not in places and not is_shown(path, places, hidden)}


def cover(places: Places, hidden: Sequence[Path]) -> Places:
    """`places`, with an empty folder over all that is hidden and would be seen in one of them."""
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


def is_shown(path: Path, places: Places, hidden: Sequence[Path] = ()) -> bool:
    """True if it lies in a folder that is shown already, and is not covered there."""
    folders = [place for place, option in places.items() if option[0] == "--ro-bind" and path.is_relative_to(place)]
    return bool(folders) and not _is_below(path, [place for place in hidden if _is_below(place, folders)])


def _steps(path: Path) -> list[Path]:
    """All links on the way to a file, each without links before it, and the file that it is at last."""
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
    """The folders that a program does not run without."""
    parts, top = path.parts, path.parent.parent
    if "node_modules" in parts:
        return [Path(*parts[: parts.index("node_modules") + 1])]
    if (top / "pyvenv.cfg").is_file() or (top / "conda-meta").is_dir():
        return [top]
    if parts[1] == "opt" and len(parts) > 3:
        return [Path(*parts[:3])]
    return [*top.glob("lib/python3*"), *top.glob("lib/libpython*")] if path.name.startswith("python") else []


def _interpreter(program: Path, search: str) -> list[Path]:
    """What the first line of a script names; nothing for another program."""
    words = list[str]()
    with suppress(OSError), program.open("rb") as file:
        mark, _, line = file.read(_MAX_HEAD).partition(b"\n")[0].partition(b"#!")
        words = [] if mark else os.fsdecode(line).split()
    if words and Path(words[0]).name == "env":
        named = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), "")
        words = [found] if (found := shutil.which(named, path=search)) else []
    return [Path(words[0])] if words and _is_file(words[0]) else []


HOME = Path("/agent")  # inside; below /tmp, Codex would not keep its helpers
_VARIABLES = """
    LANG LANGUAGE LC_ALL LC_CTYPE TERM TZ USER LOGNAME
    HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
    SSL_CERT_FILE SSL_CERT_DIR NODE_EXTRA_CA_CERTS REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
"""
_CACHES = ("NIGHTSHIFT_GSM8K", "NIGHTSHIFT_MATH", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")
_ALWAYS = """
    --unshare-user --unshare-ipc --unshare-uts --unshare-cgroup-try --cap-drop ALL --die-with-parent --new-session
"""
_CLUSTER = ("sbatch", "srun", "salloc", "scancel", "scontrol", "squeue", "sinfo", "munge", "unmunge")
_FIX = "Install bubblewrap and allow it user namespaces; or take --sandbox none."
_LOOK = 'for path; do if [ -e "$path" ]; then echo "$path can be seen" >&2; exit 1; fi; done'
_MAX_LOOKED_FOR = 1_000  # names in one hidden folder
_TRIAL_SECONDS = 60.0  # takes 0.1


@dataclass(frozen=True, slots=True)
class Form:
    """A way to build the wall: options for namespaces, the option for /proc, and what it does not keep."""

    options: tuple[str, ...]
    proc: tuple[str, ...]
    fallen: str = ""


# From the strongest. The second is as good, and for a bubblewrap before 0.8. A user namespace is in all of them:
# without it /proc/PID/root of any process of this user is a way out.
FORMS = (
    Form(("--unshare-pid", "--disable-userns"), ("--proc",)),
    Form(("--unshare-pid",), ("--proc",)),
    Form(("--unshare-pid",), ("--ro-bind", "/proc"), "the agent sees the names of other processes"),
    Form((), ("--ro-bind", "/proc"), "the agent sees other processes, and its daemons do not die by themselves"),
)


def build_argv(bwrap: str, form: Form, places: Places, folder: Path) -> list[str]:
    """bubblewrap's command line up to the words of what it shall run in `folder`."""
    argv = [bwrap, *_ALWAYS.split(), *form.options]
    for place in sorted(places, key=lambda place: place.parts):  # what lies in another comes after it
        argv += [*places[place], os.fspath(place)]
    # Who is root outside may write to most of /proc/sys, from any namespace.
    closed = [place for place, option in places.items() if option in (("--tmpfs",), ("--proc",))]
    for place in (*closed, Path("/")):
        argv += ["--remount-ro", os.fspath(place)]
    return [*argv, "--chdir", os.fspath(folder), "--"]


def hidden_places(root: Path, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """What no agent may see, wherever it lies: the checkout with its git, runs/ and .venv, caches and data."""
    home = home_of(environ)
    found = [root, root / ".git", root / "runs", root / ".venv", home / ".cache"]
    if (root / ".git").is_file():  # a linked worktree, or git init --separate-git-dir
        git_folder = root / (root / ".git").read_text().removeprefix("gitdir:").strip()
        found.append(git_folder)
        if (git_folder / "commondir").is_file():
            found.append(git_folder / (git_folder / "commondir").read_text().strip())
    found += [home] if home.is_relative_to("/usr") or home.is_relative_to("/opt") else []
    found += [Path(sys.prefix)] if sys.prefix != sys.base_prefix else []
    found += [Path(environ[name]).expanduser() for name in _CACHES if environ.get(name)]
    return tuple(dict.fromkeys(path for given in found for path in (given.absolute(), given.resolve())))


@dataclass(frozen=True, slots=True)
class Sandbox:
    """How the processes of an agent are started inside; the folder of its clone is furnished for each proposal."""

    bwrap: str
    form: Form
    login: Login
    hidden: tuple[Path, ...]
    environ: Mapping[str, str]

    def furnish(self, folder: Path) -> bytes | None:
        """Make HOME, /tmp and a list of users beside the clone, which clears them away; the credential as it was."""
        for name in ("home", "tmp"):
            (folder / name).mkdir(mode=0o700)
        try:
            name = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            name = "agent"
        (folder / "passwd").write_text(f"{name}:x:{os.getuid()}:{os.getgid()}::{HOME}:/bin/sh\n")
        return self.login.copy_in(self.environ, folder / "home")

    def take_back(self, folder: Path, before: bytes | None) -> tuple[str, ...]:
        """The credential, once all is over in `folder`; notes. `before` is what `furnish` gave."""
        return self.login.take_back(self.environ, folder / "home", before)

    def enclose(self, words: Sequence[str], clone: Clone, prompt: Path) -> tuple[list[str], dict[str, str]]:
        """The command line that runs `words` inside, and its environment. UsageError for what cannot be shown."""
        places, variables = self._places(words, clone, prompt), self._variables()
        program = shutil.which(words[0], path=self.environ.get("PATH"))
        words = [program if program and Path(program).is_absolute() else words[0], *words[1:]]
        argv = build_argv(self.bwrap, self.form, places, clone.path)
        folders = [name for name in self.environ.get("PATH", "").split(os.pathsep) if _has_programs(name, places)]
        path = os.pathsep.join(dict.fromkeys((*folders, "/usr/local/bin", "/usr/bin", "/bin")))
        inside = {"HOME": os.fspath(HOME), "TMPDIR": "/tmp", "PATH": path, "SHELL": "/bin/sh"}
        return [sys.executable, "-I", "-S", sandbox_entry.__file__, *argv, *words], {**variables, **inside}

    def trial(self, words: Sequence[str], clone: Clone) -> str | None:
        """Build the wall as for `words` and look inside for what is hidden; what is wrong, if anything."""
        clone.make()
        try:
            clone.path.mkdir()
            prompt = clone.folder / "prompt.txt"
            prompt.touch()
            self.furnish(clone.folder)
            argv, variables = self.enclose(words, clone, prompt)
            places = self._places(words, clone, prompt)
            readable = [top for top in self.hidden if os.access(top, os.R_OK | os.X_OK) and top.is_dir()]
            names = [name for top in readable for name in islice(top.iterdir(), _MAX_LOOKED_FOR)]
            looked = [str(name) for name in names if not any(place.is_relative_to(name) for place in places)]
            tried = [*argv[: -len(words)], "/bin/sh", "-c", _LOOK, "sh", *looked]
            with unblocked():
                done = subprocess.run(
                    tried,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    check=False,
                    timeout=_TRIAL_SECONDS,
                )
        except subprocess.TimeoutExpired:
            return f"no end after {_TRIAL_SECONDS:g} s"
        finally:
            clone.clear()
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return None if done.returncode == 0 else said[-1] if said else f"exit code {done.returncode}"

    def _places(self, words: Sequence[str], clone: Clone, prompt: Path) -> Places:
        search = self.environ.get("PATH", os.defpath)
        places = program_places(words, search, system_places(), self.hidden)
        places = file_places(self._variables().values(), places, self.hidden)  # certificates
        own, evidence = {HOME: "home", Path("/tmp"): "tmp", clone.path: "clone"}, clone.path / EVIDENCE_NAME
        return cover(places, self.hidden) | {
            **{place: ("--bind", f"{clone.folder}/{name}") for place, name in own.items()},
            Path("/etc/passwd"): ("--ro-bind", f"{clone.folder}/passwd"),
            prompt: ("--ro-bind", os.fspath(prompt)),
            **({evidence: ("--ro-bind", os.fspath(evidence))} if evidence.is_dir() else {}),
            # Jobs of a cluster run outside. Without munge's socket, which is not shown, these could do nothing.
            **{path: ("--ro-bind", os.devnull) for path in _programs(_CLUSTER, search) if is_shown(path, places)},
            Path("/dev"): ("--dev",),
            Path("/proc"): self.form.proc,
        }

    def _variables(self) -> dict[str, str]:
        patterns = (*_VARIABLES.split(), *self.login.variables)
        return {name: value for name, value in self.environ.items() if any(fnmatchcase(name, p) for p in patterns)}


def choose(
    asked: str, words: Sequence[str], login: Login, hidden: tuple[Path, ...], environ: Mapping[str, str], clone: Clone
) -> tuple[Sandbox | None, str]:
    """The strongest wall that can be built around `words` here, and what it does not keep, in one line or "".

    UsageError where `asked` is "bwrap" and a promise falls, or what the words name cannot be shown.
    """
    if asked == "none":
        return None, "no OS wall around the agent: --sandbox none"
    bwrap = shutil.which("bwrap", path=os.defpath) or shutil.which("bwrap")
    cause = "bubblewrap: no program bwrap on PATH"
    for form in FORMS if bwrap else ():
        wall = Sandbox(str(bwrap), form, login, hidden, environ)
        wrong = wall.trial(words, clone)
        if wrong is None and not form.fallen:
            return wall, ""
        if wrong is None and asked == "auto":
            return wall, f"a weaker OS wall around the agent: {form.fallen} ({cause})"
        cause = f"bubblewrap: {wrong}" if wrong else cause
    if asked == "bwrap":
        raise UsageError(f"--sandbox bwrap: {cause}", _FIX)
    return None, f"no OS wall around the agent: {cause}"


def _programs(names: Sequence[str], search: str) -> list[Path]:
    """Where the system has them, or the person."""
    folders = dict.fromkeys((*search.split(os.pathsep), *os.defpath.split(os.pathsep), "/usr/local/bin"))
    return [Path(found).resolve() for name in names for folder in folders if (found := shutil.which(name, path=folder))]


def _has_programs(folder: str, places: Places) -> bool:
    """True if programs can be seen in it."""
    return Path(folder).is_absolute() and any(
        place.parent == Path(folder) or (Path(folder).is_relative_to(place) and option[0] in ("--ro-bind", "--symlink"))
        for place, option in places.items()
    )
