"""All checks of both engines, without changing anything: what `uv run nightshift doctor` shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `engine` is whose readiness it decides; `fix` is imperative, "" when it is ok."""

    engine: str
    name: str
    ok: bool
    detail: str
    fix: str = ""
