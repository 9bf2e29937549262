"""What run.py, prepare.py and the `nightshift` command do before they import anything else."""

import gc
import os
import sys

_GC_OBJECTS = 100_000  # new objects between two garbage collections: modules and records are not garbage
_OLDEST = (3, 11)
_UV_SETTINGS = ("UV_FROZEN", "UV_LOCKED", "UV_NO_SYNC")  # need a uv.lock, which is not in git, or install nothing


def is_own(folder: str) -> bool:
    """Return whether a folder of sys.path contains this Python's libraries; a prefix may be /usr."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefixes = (sys.prefix, sys.base_prefix)
    names = {os.path.join(prefix, lib, version) for prefix in prefixes for lib in ("lib", sys.platlibdir)}
    return any(folder == name or folder.startswith(os.path.join(name, "")) for name in names)


def _refuse(problem: str) -> None:
    """Print the problem of this Python and the command to run, in one line. Exit with code 2."""
    settings = [f"-u {name}" for name in _UV_SETTINGS if name in os.environ]
    command = " ".join([*(["env", *settings] if settings else []), "uv run", os.path.basename(sys.argv[0])])
    sys.stderr.write(f"{sys.executable} {problem}. Run: {command} (to install uv: pip install uv)\n")
    sys.exit(2)


def begin() -> None:
    """Check this Python, and prepare the process for further imports. Older Pythons must be able to parse this file.

    PYTHONPATH is ignored: `module load` on a cluster sets it to packages of another Python. The checkout comes last in
    sys.path, so that no file at its top hides a library. Stop signals are blocked, because threads that libraries start
    on import inherit the signal mask; cli/shell.py unblocks them in the main thread.
    """
    if sys.version_info < _OLDEST:
        _refuse(f"is Python {sys.version_info[0]}.{sys.version_info[1]}; Nightshift needs 3.11 or newer")
    gc.set_threshold(_GC_OBJECTS)
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    value = os.environ.get("PYTHONPATH")
    foreign = {os.path.abspath(folder) for folder in value.split(os.pathsep)} if value else set()  # "": this folder
    kept = [folder for folder in sys.path if folder not in foreign or is_own(folder)]
    sys.path[:] = [*(folder for folder in kept if os.path.abspath(folder) != checkout), checkout]
    import signal  # only now, because a folder of PYTHONPATH may contain modules that these import
    from importlib import metadata

    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        for requirement in metadata.requires("nightshift") or ():
            if ";" not in requirement:  # not of an extra
                metadata.distribution(requirement.partition("==")[0])
    except metadata.PackageNotFoundError as error:
        _refuse(f"has no package {error.name}")
