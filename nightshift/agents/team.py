"""A team of two agents: a strategist, who proposes hypotheses, and an implementer, who writes train.toml.

Each question starts a new process (agent.py). The strategist gets the brief and the training logs, reports the outcomes
of decided experiments and proposes the next hypothesis. The implementer gets the hypothesis and no logs.
"""

import re
from dataclasses import dataclass, replace

from nightshift.agents.agent import AgentProposer
from nightshift.agents.base import Answer, Context, Proposing
from nightshift.agents.brief import ANSWER_LINES, brief, lessons, logs, opening, refusals_of
from nightshift.campaign.records import together
from nightshift.errors import UsageError

PREFIX = "team:"
_MEMBER = r"""((?:[^,'"]|'[^']*'|"[^"]*")+)"""


@dataclass(slots=True)
class TeamProposer(AgentProposer):
    """Asks a strategist, then an implementer, the two `agents`; both may be the same program."""

    # Direction, incumbent and hypothesis, while the implementer is unavailable.
    _waiting: tuple[str, bytes, Answer] | None = None

    @property
    def name(self) -> str:
        return PREFIX + ",".join(agent.title for agent in self.agents)

    def propose(self, context: Context) -> Proposing:
        """Ask for the outcomes of decided experiments and the next hypothesis, then for its train.toml."""
        context, answers = replace(context, num_proposals=1), list[Answer]()
        strategist, implementer = self.agents
        waiting, self._waiting = self._waiting, None
        if waiting is None or waiting[:2] != (context.direction, context.source):
            answers += yield from strategist.ask(strategy(context), context, logs(context), "hypothesis")
            waiting = context.direction, context.source, answers[0]
        answer = hypothesis = waiting[2]
        if not answer.cause and hypothesis.proposal.description:
            answers += yield from implementer.ask(implementation(context, hypothesis), context, {})
            unavailable = answers[-1].unavailable
            self._waiting = waiting if unavailable and unavailable.is_away else None
            answer = replace(answers[-1], proposal=hypothesis.proposal, lessons=hypothesis.lessons)
        elif not answer.cause:
            answer = replace(answer, cause=f"{strategist.name} gave no hypothesis")
        notes, costs = (note for part in answers for note in part.proposal.notes), [a.proposal.cost for a in answers]
        return (answer.with_proposal(notes=tuple(notes), cost=together(costs)),)


def members(name: str) -> list[str]:
    """Return strategist and implementer of `team:claude,codex`. A comma in quotes belongs to a command. Raises
    UsageError for another number of agents."""
    match = re.fullmatch(f"{_MEMBER},{_MEMBER}", name.removeprefix(PREFIX))
    if match is None:
        raise UsageError(f"--agent {name} does not name two agents", f"Name two: --agent {PREFIX}claude,codex.")
    return [match[1].strip(), match[2].strip()]


def strategy(context: Context) -> str:
    """Return the prompt that asks the strategist for outcomes and a hypothesis."""
    task = (
        f"think of the next experiment, {context.number:04d}. An implementer will write train.toml for your hypothesis."
    )
    edits = "- Write only the file of your answer. Other edits are discarded."
    answer = f"Your answer is a file hypothesis.txt with these lines, each on one line:\n{ANSWER_LINES}"
    return brief(context, "strategist", task, edits, answer + lessons(context))


def implementation(context: Context, hypothesis: Answer) -> str:
    """Return the prompt that asks the implementer for the train.toml of a hypothesis."""
    number, proposal = context.number, hypothesis.proposal
    task = f"change train.toml so that it tests the strategist's hypothesis for experiment {number:04d}, then end."
    return f"""{opening("implementer", task, context.direction)}
- Edit only train.toml, and only the keys that the hypothesis needs. Other edits are discarded.
- Use prime-rl's own names of the keys. nightshift/config/allowlist.toml has every open key with its range and default.

The hypothesis:
| {proposal.description}
| how it should work: {proposal.mechanism or "not given"}
{refusals_of(context)}"""
