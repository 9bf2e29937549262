"""A stand-in for a proposer that answers at once."""

from nightshift.agents.base import Answer, Context, Proposing


class StandInProposer:
    """Subclasses say what is proposed. `ticks`: how often the night looks at it before its answer is there."""

    name, sandbox, is_instant, ticks = "stand-in", "", True, 0

    def propose(self, context: Context) -> Proposing:
        for _ in range(self.ticks):
            if (yield):
                return (Answer(None, cause="stopped with the night", is_stopped=True),)
        return (self.answer(context),)

    def answer(self, context: Context) -> Answer:
        raise NotImplementedError
