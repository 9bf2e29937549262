"""What `nightshift verify` and `nightshift doctor` say."""

from __future__ import annotations

from collections.abc import Sequence

from nightshift.campaign.verify import Findings
from nightshift.engines import Check
from nightshift.engines.doctor import is_ready
from nightshift.rules import Rules
from nightshift.views import Part, View


class Verified(View, kw_only=True, tag="verify"):
    """What differs from the chain: `problems` are none of the harness's doing, `notes` may be. `chain`: its head."""

    chain: str
    num_lines: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]


class Checked(Part, kw_only=True):
    """One thing that was looked at, for the readiness of an `engine` or of `all`: what is there, or the problem with
    its fix."""

    engine: str
    name: str
    detail: str | None
    problem: str | None


class Doctor(View, kw_only=True, tag="doctor"):
    """Whether an experiment could start here, on the engine that was asked for or that this machine would use."""

    engine: str
    rules_name: str
    is_ready: bool
    checks: tuple[Checked, ...]


def verified(found: Findings) -> Verified:
    """Of a comparison with the chain."""
    return Verified(
        chain=found.head, num_lines=found.num_lines, problems=tuple(found.problems), notes=tuple(found.notes)
    )


def examined(found: Sequence[Check], rules: Rules) -> Doctor:
    """Of what doctor looked at."""
    return Doctor(
        engine=rules.engine,
        rules_name=rules.name,
        is_ready=is_ready(found, rules.engine),
        checks=tuple(
            Checked(
                engine=each.engine,
                name=each.name,
                detail=each.detail or None,
                problem=None if each.ok else str(each.problem),
            )
            for each in found
        ),
    )
