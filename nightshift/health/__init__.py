"""The RL health digest: what the curves of a run say is wrong, in five lines that an agent can act on.

Every check reads Steps, whichever engine wrote them; a field that is None gives no finding. A trend is a
robust slope with its standard error, never a single point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nightshift.health import checks
from nightshift.health.checks import Conditions, Finding, Severity
from nightshift.metrics import Step

__all__ = ["MAX_FINDINGS", "Conditions", "digest", "examine"]

MAX_FINDINGS = 5
MAX_KEYS = 3  # a finding; more is no pointer


def digest(steps: Sequence[Step], conditions: Conditions) -> str:
    """`examine` as plain text, one finding a line."""
    return "\n".join(map(str, examine(steps, conditions)))


def examine(steps: Sequence[Step], conditions: Conditions) -> list[Finding]:
    """At most five findings, the worst first; one line that says so when all is well; empty without steps."""
    if not steps:
        return []
    found = [finding for check in checks.CHECKS for finding in check(steps, conditions)]
    found += [Finding(text, (), Severity.COSTLY) for text in conditions.remarks]
    found.sort(key=lambda finding: -finding.severity)  # stable: in the order of the checks within
    found = [*found, checks.note(steps, conditions)] if found else [checks.healthy(steps)]
    used = conditions.used_keys
    return [
        replace(finding, keys=tuple(key for key in finding.keys if used is None or key in used)[:MAX_KEYS])
        for finding in found[:MAX_FINDINGS]
    ]
