"""Two questions in one conversation, asked by a scripted user; the reward is the share of right answers.

A verifiers v1 environment: the taskset contains the tasks, the Env plays them. Replace `questions` and `right` by your
own.
"""

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["TwoTurnEnv", "TwoTurns"]


class Data(vf.TaskData):
    """The data of a task, which is sent between processes."""

    key: str
    questions: list[str]
    answers: list[str]


class TwoTurn(vf.Task[Data]):
    """A task, rewarded for its answers in their order."""

    @property
    def key(self) -> str:
        """The key of the task; it must not depend on the order."""
        return self.data.key

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return the reward, 0 to 1, also for a conversation that ended early."""
        words = [(message.content or "").split() for message in trace.assistant_messages]
        replies = [reply[-1].strip(".") if reply else "" for reply in words]
        num_right = sum(reply == answer for reply, answer in zip(replies, self.data.answers, strict=False))
        return num_right / len(self.data.answers)


class Config(vf.TasksetConfig):
    """The arguments, `args` in rules.toml."""

    size: int = 1000


class TwoTurnEnv(vf.SingleAgentEnv):
    """The scripted user, who asks the next question after any answer."""

    async def run(self, task: TwoTurn, agents: vf.Agents) -> None:
        """Play one conversation."""
        async with agents.agent.interaction(task) as interaction:
            for question in task.data.questions:
                if (await interaction.turn(question)).terminated:
                    break


class TwoTurns(vf.Taskset[TwoTurn, Config]):
    """All tasks; Nightshift splits them by their keys."""

    def load(self) -> Iterator[TwoTurn]:
        """Yield the same tasks at each call."""
        rng = random.Random(0)
        for index in range(self.config.size):
            start, more, less = rng.randint(30, 70), rng.randint(2, 9), rng.randint(2, 9)
            questions = [
                f"Mia has {start} pens. Mia buys {more} pens. How many pens now?",
                f"Mia loses {less} of them. How many pens now?",
            ]
            answers = [str(start + more), str(start + more - less)]
            data = Data(idx=index, prompt=None, key=f"{index}", questions=questions, answers=answers)
            yield TwoTurn(data, self.config.task)
