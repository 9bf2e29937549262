"""Episodes of several turns: what the policy said in each, and of all that was said which tokens it learns from.

Each seat has a chat of its own; the trained one's becomes a row of the batch: the first prompt, then its answers and
between them what it was told, which it does not learn from. The other seat's answers, where a policy gives them, are in
no row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nightshift.engines.trl.sampler import Sample
from nightshift.evaluation.episode import Episode

_CUT = Sample([], True)
Say = Callable[[list[list[int]]], list[Sample]]  # a completion of each prompt, in their order


class Played(Episode, Protocol):
    """One that may ask for the other seat."""

    is_other_asked: bool


@dataclass(slots=True)
class Trace:
    """One seat of one episode in token ids: what came first, all that followed, and which of that it said itself."""

    prompt: list[int] = field(default_factory=list)
    completion: list[int] = field(default_factory=list)
    is_own: list[int] = field(default_factory=list)
    truncated: bool = False
    _text: str = ""  # of the chat up to its last answer

    def hear(self, chat: Sequence[Any], tokenizer: Any) -> list[int]:
        """Take in the chat; all ids up to where the seat is to speak. ValueError where its text is not what it was."""
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        if not self.prompt:
            self.prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            if not text.startswith(self._text):
                raise ValueError("the chat template writes earlier turns anew: several turns cannot be trained with it")
            heard = tokenizer(text[len(self._text) :], add_special_tokens=False)["input_ids"]
            if heard[0] in tokenizer.all_special_ids and self.completion[-1] in tokenizer.all_special_ids:
                del heard[0]  # the end of its answer, which it said itself, perhaps by another token
            self.completion += heard
            self.is_own += [0] * len(heard)
        self._text = text
        return self.prompt + self.completion

    def say(self, said: Sample, tokenizer: Any) -> str:
        """Take in an answer; its text."""
        self.completion += said.ids
        self.is_own += [1] * len(said.ids)
        self.truncated |= said.truncated
        text: str = tokenizer.decode(said.ids, skip_special_tokens=True)
        self._text += text
        return text


def check_template(tokenizer: Any) -> None:
    """ValueError for a chat template with which an answer would be another text once the chat goes on."""
    trace, chat = Trace(), [{"role": "user", "content": "a"}]
    trace.hear(chat, tokenizer)
    said = trace.say(Sample([*tokenizer(" b ")["input_ids"], tokenizer.eos_token_id], False), tokenizer)
    trace.hear([*chat, {"role": "assistant", "content": said}, *chat], tokenizer)


def play(episodes: Sequence[Played], tokenizer: Any, say: Say, say_other: Say, room: int) -> list[Trace]:
    """Play all episodes to their ends, a turn of all that are open at a time; the trained seat's trace of each.

    Who has heard more than `room` tokens is cut: it says nothing. A seat that was never asked has a prompt and an
    answer of one token that nothing is learnt from.
    """
    own, others = ([Trace() for _ in episodes] for _ in range(2))
    while asked := [(index, chat) for index, one in enumerate(episodes) if (chat := one.ask()) is not None]:
        for is_other, traces, speak in ((False, own, say), (True, others, say_other)):
            heard = {i: traces[i].hear(chat, tokenizer) for i, chat in asked if episodes[i].is_other_asked is is_other}
            prompts = {index: ids for index, ids in heard.items() if len(ids) <= room}
            said = dict(zip(prompts, speak([*prompts.values()]) if prompts else (), strict=True))
            for index in heard:
                episodes[index].answer(traces[index].say(said.get(index, _CUT), tokenizer))
    end = tokenizer.eos_token_id
    for trace in own:
        if not trace.completion:
            trace.prompt, trace.completion, trace.is_own = [end], [end], [0]
    return own
