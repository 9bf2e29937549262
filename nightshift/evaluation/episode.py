"""What every environment poses and scores, whoever wrote it: an example, and one episode of it."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from nightshift.campaign.records import Completion
from nightshift.evaluation.policy import Message

Split = Literal["train", "selection", "sealed"]
Chat = Sequence[Message]
Complete = Callable[[Sequence[Chat]], Sequence[Completion]]  # what the policy says to chats


class Example(Protocol):
    """One problem, or one opening of a game. `answer`: what is right, for people who read rollouts."""

    key: str  # the same in every split, order and size
    answer: str


class Episode(Protocol):
    """One example in the hands of a policy. One with more to tell has `details()`: how it went, by name."""

    def ask(self) -> Chat | None:
        """The chat that the policy shall continue; None once the episode is over."""
        ...

    def answer(self, text: str) -> None:
        """What the policy said to the last chat."""
        ...

    def score(self) -> float:
        """0..1; what was not answered scores as an empty text."""
        ...

    def is_formatted(self) -> bool | None:
        """Whether the answer is written as asked; None where no form is asked for."""
        ...
