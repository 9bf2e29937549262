"""Tic-tac-toe as a verifiers v1 environment of two seats, so that prime-rl can train on it.

Two tasks an opening, one a seat: that is trained, so all rollouts of a group have the same, and grpo and max_rl
subtract its mean. In the other sits the served model itself, whose answers train nothing, or one of the pool.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Literal

import verifiers.v1 as vf
from nightshift_gsm8k.taskset import ChatHarness, WordProblemConfig

from nightshift_tictactoe import data
from nightshift_tictactoe.game import SEATS, practice

__all__ = ["ChatHarness", "TicTacToeEnv", "TicTacToeTaskset"]


class Opening(vf.TaskData):
    """What travels between prime-rl's processes. `seat`: the trained one."""

    key: str
    board: str
    answer: str
    seat: Literal["X", "O"]


class OpeningTask(vf.Task[Opening]):
    """One seat of one opening; who scores it is the environment."""

    @property
    def key(self) -> str:
        """The example's, and the seat."""
        return f"{self.data.key}-{self.data.seat}"


class TicTacToeTaskset(vf.Taskset[OpeningTask, WordProblemConfig]):
    """The openings without the test split; `seed`: their order."""

    def load(self) -> Iterator[OpeningTask]:
        """Both seats of each."""
        examples = data.load(self.config.split, self.config.size)
        seats = [(example, seat) for example in examples for seat in SEATS]
        random.Random(self.config.seed).shuffle(seats)
        for index, (example, seat) in enumerate(seats):
            told = {"key": example.key, "board": example.board, "answer": example.answer, "seat": seat}
            yield OpeningTask(Opening(idx=index, prompt=None, **told), self.config.task)


class TicTacToeConfig(vf.EnvConfig):
    """`opponent` has a temperature of its own in its `sampling`. `played_by`: `self` is the served model."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    opponent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    played_by: Literal["self", "pool"] = "self"


class TicTacToeEnv(vf.Env[TicTacToeConfig]):
    """A game an episode."""

    async def setup(self, agents: vf.Agents) -> None:
        """The other seat teaches nothing."""
        agents.opponent.trainable = False

    async def run(self, task: OpeningTask, agents: vf.Agents) -> None:
        """Play, and score the trained seat. A seat that gives no move forfeits.

        A seat's interaction opens at its first move: prime-rl counts a trace without a turn as an error
        (EmptyTrajectory in prime_rl/orchestrator/dispatcher.py).
        """
        opening = task.data
        example = data.Example(opening.key, opening.board, opening.answer)
        is_self = self.config.played_by == "self"
        while True:
            match = practice(example, self.config.played_by, SEATS.index(opening.seat), random.getrandbits(64))
            if is_self or match.ask() is not None:
                break  # a player of the pool may win before the trained seat has moved: such a game is played anew
        asked = vf.Task(vf.TaskData(idx=opening.idx, prompt=None))
        seats: dict[bool, vf.Interaction] = {}
        # The trained seat's interaction closes first, so its trace is the episode's first.
        async with AsyncExitStack() as others, AsyncExitStack() as own:
            while (chat := match.ask()) is not None:
                is_other = match.is_other_asked
                if is_other not in seats:
                    agent, stack = (agents.opponent, others) if is_other else (agents.agent, own)
                    seats[is_other] = await stack.enter_async_context(agent.interaction(asked))
                segment = await seats[is_other].turn(chat[-1]["content"])
                match.answer(segment.last_reply)
        if False in seats:
            trace = seats[False].trace
            trace.record_reward("score", match.score())
            trace.record_metric("forfeit", float(match.details()["ended"] == "forfeit"))
