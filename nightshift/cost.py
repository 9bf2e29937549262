"""What agents' work cost, as far as their own output tells. Not told is None, never 0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeVar

from msgspec import Meta

Tokens = Annotated[int, Meta(ge=0, le=2**53)]
Dollars = Annotated[float, Meta(ge=0, le=1e9)]
Number = TypeVar("Number", int, float)
Times = Annotated[int, Meta(ge=0, le=2**53)]
Figure = Literal["tokens_in", "tokens_out", "dollars"]
FIGURES: tuple[Figure, ...] = ("tokens_in", "tokens_out", "dollars")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one proposal, or the sum of several. `tokens_in` holds those that came out of a cache, `tokens_out` those that
    were thought; `dollars` are the program's own figure, US; `seconds` are wall-clock. `untold`: the figures of one
    proposal that are more than what stands here, for not each agent that was asked for it told them."""

    tokens_in: Tokens | None = None
    tokens_out: Tokens | None = None
    dollars: Dollars | None = None
    seconds: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    untold: tuple[Figure, ...] = ()

    def tells(self, figure: Figure) -> bool:
        """Whether a figure is all that it was."""
        return getattr(self, figure) is not None and figure not in self.untold

    def __add__(self, other: Cost) -> Cost:
        """What is told of each, together: None where neither tells it. What is `untold` who sums keeps count of."""
        return Cost(
            _sum(self.tokens_in, other.tokens_in),
            _sum(self.tokens_out, other.tokens_out),
            _sum(self.dollars, other.dollars),
            _sum(self.seconds, other.seconds),
        )


@dataclass(frozen=True, slots=True)
class Bill:
    """Of so many proposals, of which `num_priced` told all their dollars, `num_in` and `num_out` all their tokens: of
    the others only what was told is in the `total`."""

    total: Cost = field(default_factory=Cost)
    num_proposals: Times = 0
    num_priced: Times = 0
    num_in: Times = 0
    num_out: Times = 0

    def plus(self, cost: Cost | None) -> Bill:
        """With one proposal more; the same for None, which nobody was asked for."""
        if cost is None:
            return self
        told = [int(cost.tells(figure)) for figure in ("dollars", "tokens_in", "tokens_out")]
        return self.and_of(Bill(cost, 1, *told))

    def and_of(self, other: Bill) -> Bill:
        """Both."""
        return Bill(
            self.total + other.total,
            self.num_proposals + other.num_proposals,
            self.num_priced + other.num_priced,
            self.num_in + other.num_in,
            self.num_out + other.num_out,
        )


NO_BILL = Bill()


def together(costs: Iterable[Cost | None]) -> Cost | None:
    """What all that were asked for one proposal cost; None where nobody was. What some of them tell and others do not
    is `untold`."""
    asked = [cost for cost in costs if cost is not None]
    total = sum(asked, Cost())
    untold = [f for f in FIGURES if getattr(total, f) is not None and not all(cost.tells(f) for cost in asked)]
    return replace(total, untold=tuple(untold)) if asked else None


def _sum(one: Number | None, other: Number | None) -> Number | None:
    return other if one is None else one if other is None else one + other
