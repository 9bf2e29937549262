"""The OS wall around an agent: bubblewrap, where this machine has it.

Inside are the clone, an empty HOME and an empty /tmp, all writable; the agent's program, the system's programs and
libraries, the network and a few named variables. Nothing else of this machine is: no checkout, runs/, cache, data,
HOME, socket or other process. What may be seen is listed (places.py, login.py); what must not be and lies in something
listed, such as a checkout in /usr/src, is covered. Before a night the very command line is tried, and looks for it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from nightshift.errors import UsageError
from nightshift.guard import doorstep
from nightshift.guard.clone import EVIDENCE_NAME, Clone
from nightshift.guard.login import Login, home_of
from nightshift.guard.places import Places, cover, file_places, is_shown, program_places, system_places

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
    if (root / ".git").is_file():  # a work tree beside another
        found.append(Path((root / ".git").read_text().removeprefix("gitdir:").strip()).parents[1])
    found += [home] if home.is_relative_to("/usr") or home.is_relative_to("/opt") else []
    found += [Path(sys.prefix)] if sys.prefix != sys.base_prefix else []
    found += [Path(environ[name]).expanduser() for name in _CACHES if environ.get(name)]
    return tuple(dict.fromkeys(path for given in found for path in (given.absolute(), given.resolve())))


@dataclass(frozen=True, slots=True)
class Wall:
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
        return [sys.executable, "-I", "-S", doorstep.__file__, *argv, *words], {**variables, **inside}

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
            done = subprocess.run(
                tried, env=variables, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_TRIAL_SECONDS
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
) -> tuple[Wall | None, str]:
    """The strongest wall that can be built around `words` here, and what it does not keep, in one line or "".

    UsageError where `asked` is "bwrap" and a promise falls, or what the words name cannot be shown.
    """
    if asked == "none":
        return None, "no OS wall around the agent: --sandbox none"
    bwrap = shutil.which("bwrap", path=os.defpath) or shutil.which("bwrap")
    cause = "bubblewrap: no program bwrap on PATH"
    for form in FORMS if bwrap else ():
        wall = Wall(str(bwrap), form, login, hidden, environ)
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
