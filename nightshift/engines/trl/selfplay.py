"""The trainer of environments of which one is a game: rollouts are whole games, of which one seat is trained.

All rollouts of a group are of one opening and one seat, so what grpo and max_rl subtract is the mean of that seat. Who
plays the other seat ([orchestrator.train.opponent] of train.toml): the policy itself, the policy of some steps ago, or
a player of the fixed pool.
"""

import copy
import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from nightshift.engines.trl.grpo import Trainer
from nightshift.engines.trl.play import check_template, play
from nightshift.evaluation.environment import Game


class SelfPlay(Trainer):
    """See the module."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rollout_func = self._play
        check_template(self.processing_class)
        self._opponent = self._settings["opponent"]
        self._previous: tuple[int, Any] | None = None  # a step, and the policy after it
        self._num_games = itertools.count()
        self.earlier: dict[int, list[torch.Tensor]] = {}  # by step, in order: the parameters after it
        self._fifth = 0  # of the training, of which a step was kept last
        self._indices: list[int] = []
        self._rewards: Iterator[float] = iter(())

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._indices = [row["index"] for row in inputs]
        return super()._generate_and_score_completions(inputs)

    def _play(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """What TRL calls in place of generation."""
        model, kind = self.accelerator.unwrap_model(self.model), self._opponent["type"]
        step = self.state.global_step
        if kind == "previous" and (self._previous is None or step - self._previous[0] >= self._opponent["interval"]):
            self._previous = step, copy.deepcopy(model).eval()
        other = self._previous[1] if self._previous else model
        episodes: list[Any] = []
        for index in self._indices:
            environment, example = self._set[index]
            if isinstance(environment, Game):
                number = next(self._num_games)
                seat, seed = number // self.num_generations, number + 1_000_003 * self.args.seed
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

    def train_for(self, budget_seconds: float) -> dict[str, Any]:
        """And which earlier steps are kept: the first that ended in each fifth of the training but the first."""
        trained = super().train_for(budget_seconds)
        return trained | {"earlier_steps": [step for step in self.earlier if step < self.state.global_step]}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """And keep such a step."""
        super().log(logs, start_time)
        step, max_steps = self.state.global_step, self._settings["max_steps"] or math.inf
        fifth = int(5 * max((self._clock() - self._started) / (self._ends - self._started), step / max_steps))
        if self._fifth < fifth < 5:
            weights = [p.detach().to("cpu", torch.float32, copy=True) for p in self.model.parameters()]
            self._fifth, self.earlier[step] = fifth, weights

    def _score(self, text: str, index: int) -> float:
        """Of the next episode that was played: rewards are asked for in their order."""
        return next(self._rewards)
