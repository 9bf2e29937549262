"""What evaluation needs of a trained policy, whichever engine made it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a trainer starts by importing this, and waits for no more than it uses
    from nightshift.campaign.records import Completion, ProgressCallback, Weights
    from nightshift.config.rules import Decoding

Message = Mapping[str, str]  # {"role": ..., "content": ...}


class Policy(Protocol):
    def load_final_weights(self) -> Weights:
        """Load the last complete weights written before the end into what completes, and prove which."""
        ...

    def complete(
        self, prompts: Sequence[Sequence[Message]], decoding: Decoding, progress: ProgressCallback
    ) -> list[Completion]:
        """One completion a prompt, in order. Raises EngineError when the policy cannot answer."""
        ...

    @property
    def earlier(self) -> Mapping[int, Callable[[], None]]:
        """Of a game a few steps before the last, evenly spread over the training: what has the weights after each
        complete from then on, or raises EngineError."""
        ...
