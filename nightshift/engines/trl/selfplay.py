"""The trainer of games: a rollout is a whole game, in which one seat is trained.

All rollouts of a group have the same opening and seat, so the group mean of grpo and max_rl is a mean of that seat. The
opponent ([orchestrator.train.opponent] of train.toml) is the policy itself, an earlier policy, or a player of the fixed
pool.

Each seat has its own chat. A row of the batch is the chat of the trained seat: the first prompt, then its answers and,
between them, messages that are not trained. Answers of the other seat are not in the batch.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from nightshift.engines.trl.grpo import Trainer
from nightshift.engines.trl.sampler import Sample
from nightshift.evaluation.environment import Game

_CUT = Sample([], True)
Say = Callable[[list[list[int]]], list[Sample]]  # returns one completion per prompt, in order


class Trace(msgspec.Struct):
    """The chat of one seat in one episode, in token ids."""

    prompt: list[int] = []  # the first one
    completion: list[int] = []  # all tokens after the prompt
    is_own: list[int] = []  # 1 for the tokens of the completion that the seat sampled
    _text: str = ""  # up to the last answer

    def hear(self, chat: Sequence[Any], tokenizer: Any) -> list[int]:
        """Add the new messages of the chat. Return all ids, the prompt of the next answer.

        ValueError if the chat template changes earlier text.
        """
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        if not text.startswith(self._text):
            raise ValueError("the chat template changes earlier turns: it cannot be used to train several turns")
        heard = tokenizer(text[len(self._text) :], add_special_tokens=False)["input_ids"]
        self._text = text
        if not self.prompt:
            self.prompt = heard
        else:
            if heard[0] in tokenizer.all_special_ids and self.completion[-1] in tokenizer.all_special_ids:
                del heard[0]  # the end of the answer, which the seat has sampled, perhaps as another token
            self.completion += heard
            self.is_own += [0] * len(heard)
        return self.prompt + self.completion

    def say(self, answer: Sample, tokenizer: Any) -> str:
        """Add an answer. Return its text."""
        self.completion += answer.ids
        self.is_own += [1] * len(answer.ids)
        text: str = tokenizer.decode(answer.ids, skip_special_tokens=True)
        self._text += text
        return text


def play(episodes: Sequence[Any], tokenizer: Any, say: Say, say_other: Say, room: int) -> list[Trace]:
    """Play all episodes, one turn of all open episodes at a time. Return the trace of each trained seat.

    A seat with more than `room` tokens gives an empty, truncated answer. A seat without a turn gets a prompt and an
    answer of one token that is not trained.
    """
    trained, others = ([Trace() for _ in episodes] for _ in range(2))
    while asked := [(index, chat) for index, episode in enumerate(episodes) if (chat := episode.ask()) is not None]:
        for is_other, traces, speak in ((False, trained, say), (True, others, say_other)):
            heard = {i: traces[i].hear(chat, tokenizer) for i, chat in asked if episodes[i].is_other_asked is is_other}
            prompts = {index: ids for index, ids in heard.items() if len(ids) <= room}
            answers = dict(zip(prompts, speak([*prompts.values()]) if prompts else (), strict=True))
            for index in heard:
                episodes[index].answer(traces[index].say(answers.get(index, _CUT), tokenizer))
    end = tokenizer.eos_token_id
    for trace in trained:
        if not trace.completion:
            trace.prompt, trace.completion, trace.is_own = [end], [end], [0]
    return trained


class SelfPlay(Trainer):
    """GRPO on whole episodes of games and other environments."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rollout_func = self._play
        self._opponent = self._settings["opponent"]
        self._previous: tuple[int, Any] | None = None  # a step and its policy
        self._num_games = 0
        self._rewards: Iterator[float] = iter(())

    def _play(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Play the episodes of a batch, in place of TRL's generation."""
        model, kind = self.accelerator.unwrap_model(self.model), self._opponent["type"]
        step = self.state.global_step
        if kind == "previous" and (self._previous is None or step - self._previous[0] >= self._opponent["interval"]):
            self._previous = step, copy.deepcopy(model).eval()
        other = self._previous[1] if self._previous else model
        episodes: list[Any] = []
        for index in self._indices:
            environment, example = self._set[index]
            if isinstance(environment, Game):
                seat, seed = self._num_games // self.num_generations, self._num_games + 1_000_003 * self.args.seed
                self._num_games += 1
                episodes.append(environment.practice(example, kind, seat, seed))
            else:
                episodes.append(environment.episode(example))
        self.model.eval()
        with self.accelerator.autocast(), torch.no_grad():
            say = partial(self._say, model, self.temperature)
            say_other = partial(self._say, other, self._opponent["temperature"])
            room = self._settings["seq_len"] - self.max_completion_length
            traces = play(episodes, self.processing_class, say, say_other, room)
        self.model.train()
        self._rewards = (episode.score() for episode in episodes)
        return {
            "prompt_ids": [trace.prompt for trace in traces],
            "completion_ids": [trace.completion for trace in traces],
            "env_mask": [trace.is_own for trace in traces],
            "logprobs": None,
        }

    def _score(self, text: str, index: int) -> float:
        """Return the score of the next episode: TRL asks for rewards in order."""
        return next(self._rewards)
