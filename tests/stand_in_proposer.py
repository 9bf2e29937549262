"""A stand-in for a proposer that answers at once."""

from nightshift.agents.base import Answer, Context, Proposing


class StandInProposer:
    """Subclasses say what is proposed."""

    name, sandbox, is_instant = "stand-in", "", True

    def propose(self, context: Context) -> Proposing:
        return (self.answer(context),)
        yield  # a generator

    def answer(self, context: Context) -> Answer:
        raise NotImplementedError
