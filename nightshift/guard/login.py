"""An agent's login: what is copied into the HOME that it has behind the wall, and the one file that comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from nightshift.files import read_file, write_atomically

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
        except (OSError, ValueError, RecursionError) as error:
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
