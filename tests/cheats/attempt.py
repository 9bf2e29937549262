"""What an attempt to cheat is, and how one is written down."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.cheats.checkout import Checkout, Finding

Act = Callable[[Checkout], object]  # a Finding, or anything else if the candidate is still to be handed in


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to a better number without a better policy.

    `setting`: what the agent may do. `train.toml`: hand that file in; `checkout`: write anything in the checkout,
    choose the environment variables, and call run.py itself; `none`, `user` and `bwrap`: run as `nightshift night
    --agent`, in a clone and that --sandbox. `expected`: refused, harmless, named, not defended (then the trick is known
    to succeed), or counted (it may succeed: without a sandbox nothing is promised). `kind`: what it goes at.
    """

    name: str
    setting: str
    kind: str
    action: str
    expected: str
    act: Act

    def make(self, checkout: Checkout) -> Finding:
        """Act, hand in the candidate unless that was done, and judge. No code of the agent may have run."""
        acted = self.act(checkout)
        finding = acted if isinstance(acted, Finding) else checkout.hand_in()
        if finding.outcome == "harmless" and checkout.marker.exists():
            return Finding("succeeded", f"code of the agent ran: {checkout.marker.read_text().partition(chr(10))[0]}")
        return finding

    def holds(self, finding: Finding) -> bool:
        """True if the attempt came to what is expected of it."""
        if self.expected == "counted":
            return finding.outcome != "unclear"
        return finding.outcome == {"not defended": "succeeded"}.get(self.expected, self.expected)


@dataclass(frozen=True, slots=True)
class Collection:
    """The attempts of one setting and kind; as a decorator it takes one more."""

    setting: str
    kind: str
    attempts: list[Attempt] = field(default_factory=list)

    def __call__(self, name: str, expected: str, action: str = "", kind: str = "") -> Callable[[Act], Act]:
        """`action` is told by the docstring if not here."""

        def take(act: Act) -> Act:
            told = f"{action[0].upper()}{action[1:]}." if action else inspect.cleandoc(str(act.__doc__))
            self.attempts.append(Attempt(name, self.setting, kind or self.kind, told, expected, act))
            return act

        return take
