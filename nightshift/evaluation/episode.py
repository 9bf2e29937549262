"""What evaluation needs of environments and engines: an example, one episode of it, and the policy that plays it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # a trainer starts by importing this, and waits for no more than it uses
    from nightshift.campaign.records import Completion, ProgressCallback, Weights
    from nightshift.config.rules import Decoding

Split = Literal["train", "validation", "test"]
Message = Mapping[str, str]  # {"role": ..., "content": ...}
Chat = Sequence[Message]
Complete = Callable[[Sequence[Chat]], "Sequence[Completion]"]  # one completion a chat, in order


class Example(Protocol):
    """One problem, or one opening of a game. `answer`: the right one, for people who read rollouts."""

    key: str  # the same in every split, order and size
    answer: str


class Episode(Protocol):
    """One example as a policy plays it. An episode with more to show has `details()`, by name."""

    def ask(self) -> Chat | None:
        """Return the chat that the policy continues; None once the episode is over."""
        ...

    def answer(self, text: str) -> None:
        """Take the policy's continuation of the last chat."""
        ...

    def score(self) -> float:
        """Return 0..1. Without an answer it is the score of an empty text."""
        ...

    def is_formatted(self) -> bool | None:
        """Return whether the answer has the requested format; None if none is requested."""
        ...


class Policy(Protocol):
    """A trained policy, whichever engine made it."""

    def load_final_weights(self) -> Weights:
        """Load the last complete weights of the training. Return the proof of which they are."""
        ...

    def complete(
        self, prompts: Sequence[Sequence[Message]], decoding: Decoding, progress: ProgressCallback
    ) -> list[Completion]:
        """Return one completion a prompt, in order. Raises EngineError if the policy cannot answer."""
        ...

    @property
    def earlier(self) -> Mapping[int, Callable[[], None]]:
        """For a game: loaders of the weights after a few earlier steps, by step, evenly spread over the training.

        A loader raises EngineError.
        """
        ...
