"""What an attempt of cheats.py is, and how one is written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cheat_checkout import Checkout, Finding

HONEST = "score and verdict are those of the honest run"
USUAL_CHECK = {
    "refused": "exit 2, one line that says why, nothing recorded",
    "harmless": HONEST,
    "named": f"exit 2 and a line that names it, or a note that does, and then {HONEST}",
    "not defended": HONEST,
}
Act = Callable[[Checkout], Finding]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to a better number without a better policy.

    `setting`: what the agent may do. `train.toml`: hand that file in; `checkout`: write anything in the checkout,
    choose the environment variables, and call run.py itself; `night`: run as `nightshift night --agent`, in a
    clone, with the rights of the person. `expected`: refused, harmless, named, or not defended (then the trick
    is known to succeed). `check`: how the outcome is told.
    """

    name: str
    setting: str
    deed: str
    expected: str
    check: str
    act: Act

    def holds(self, finding: Finding) -> bool:
        """True if the attempt came to what is expected of it."""
        return finding.outcome == {"not defended": "succeeded"}.get(self.expected, self.expected)


@dataclass(frozen=True, slots=True)
class Collection:
    """The attempts of one setting; as a decorator it takes one more."""

    setting: str
    attempts: list[Attempt] = field(default_factory=list)

    def __call__(self, name: str, expected: str, deed: str, check: str = "") -> Callable[[Act], Act]:
        """`check` is for what is looked at beside the usual: `Checkout.judge` and `judge_night`."""

        def take(act: Act) -> Act:
            self.attempts.append(Attempt(name, self.setting, deed, expected, check or USUAL_CHECK[expected], act))
            return act

        return take
