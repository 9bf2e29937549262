"""git in prime-rl's checkout: what it says without the user's configuration, and settings that leave no trace."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from nightshift.errors import EngineError

_GIT_SECONDS = 30.0


def read_git(root: Path, *arguments: str) -> str:
    """What a reading git command prints, whatever the user's git configuration says. EngineError if it fails."""
    environ = {
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        # A checkout that another user installed for all: nothing of it is executed here.
        **git_config({"safe.directory": "*", "core.fsmonitor": "false", "core.hooksPath": os.devnull}, {}),
    }
    command = ["git", "--no-optional-locks", "-C", os.fspath(root), *arguments]
    try:
        result = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GIT_SECONDS
        )
    except FileNotFoundError:
        raise EngineError("git is not installed", "Install git.") from None
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"git {arguments[0]} in {root} did not answer in {_GIT_SECONDS:g} s", "Check the disk."
        ) from None
    if result.returncode:
        raise EngineError(
            f"git {arguments[0]} fails in {root}: {' '.join(result.stderr.split())[:200]}",
            "Run: uv run prepare.py --engine prime-rl.",
        )
    return result.stdout.strip("\n")


def git_config(settings: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Settings for git and all that it starts, added to those in `environ`; no configuration file is touched."""
    count = int(environ.get("GIT_CONFIG_COUNT") or 0)
    variables = {"GIT_CONFIG_COUNT": str(count + len(settings))}
    for index, (key, value) in enumerate(settings.items(), start=count):
        variables |= {f"GIT_CONFIG_KEY_{index}": key, f"GIT_CONFIG_VALUE_{index}": value}
    return variables
