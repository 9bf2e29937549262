"""Tic-tac-toe as a verifiers v1 environment of two seats.

Each opening has two tasks, one for each seat. The task's seat is trained, so that all rollouts of a group have the same
seat. The other seat is the served model, untrained, or a player of the pool.
"""

import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Literal

import verifiers.v1 as vf
from nightshift_gsm8k.taskset import WordProblemConfig

from nightshift_tictactoe import data
from nightshift_tictactoe.game import SEATS, practice


class Opening(vf.TaskData):
    """The data of a task that prime-rl's processes exchange. `seat`: the trained seat."""

    key: str
    board: str
    answer: str
    seat: Literal["X", "O"]


class OpeningTask(vf.Task[Opening]):
    """One seat of one opening. The environment records the score."""

    @property
    def key(self) -> str:
        """The example's key and the seat."""
        return f"{self.data.key}-{self.data.seat}"


class TicTacToeTaskset(vf.Taskset[OpeningTask, WordProblemConfig]):
    """The openings without the test split, in an order that `seed` fixes."""

    def load(self) -> Iterator[OpeningTask]:
        """Yield a task for each opening and seat."""
        examples = data.load(self.config.split, self.config.size)
        seats = [(example, seat) for example in examples for seat in SEATS]
        random.Random(self.config.seed).shuffle(seats)
        for index, (example, seat) in enumerate(seats):
            yield OpeningTask(Opening(idx=index, prompt=None, seat=seat, **asdict(example)), self.config.task)


class TicTacToeConfig(vf.EnvConfig):
    """The seats. `opponent`'s `sampling` has its own temperature. `played_by`: "self" is the served model."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    opponent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    played_by: Literal["self", "pool"] = "self"


class TicTacToeEnv(vf.Env[TicTacToeConfig]):
    """An environment whose episode is one game."""

    async def setup(self, agents: vf.Agents) -> None:
        """Exclude the other seat from training."""
        agents.opponent.trainable = False

    async def run(self, task: OpeningTask, agents: vf.Agents) -> None:
        """Play a game, and score the trained seat.

        A seat's interaction opens at its first move: for prime-rl a trace without a turn is an error (EmptyTrajectory).
        """
        opening, played_by = task.data, self.config.played_by
        while True:
            match = practice(opening, played_by, SEATS.index(opening.seat), random.getrandbits(64))
            if played_by == "self" or match.ask() is not None:
                break  # otherwise the player of the pool won before the trained seat moved: draw another game
        turn_task = vf.Task(vf.TaskData(idx=opening.idx, prompt=None))
        seats: dict[bool, vf.Interaction] = {}
        # The trained seat's interaction closes first, so its trace is the first of the episode.
        async with AsyncExitStack() as others, AsyncExitStack() as trained:
            while (chat := match.ask()) is not None:
                is_other = match.is_other_asked
                if is_other not in seats:
                    agent, stack = (agents.opponent, others) if is_other else (agents.agent, trained)
                    seats[is_other] = await stack.enter_async_context(agent.interaction(turn_task))
                segment = await seats[is_other].turn(chat[-1]["content"])
                match.answer(segment.last_reply)
        if False in seats:
            trace = seats[False].trace
            trace.record_reward("score", match.score())
            trace.record_metric("forfeit", float(match.details()["ended"] == "forfeit"))
