"""--only and the line `Only:` of a direction: no other key changes, whoever proposes."""

from __future__ import annotations

from pathlib import Path

import pytest

from nightshift.agents.availability import Availability, Meaning
from nightshift.agents.base import Answer, Context, Proposer, Proposing
from nightshift.agents.search import SearchProposer
from nightshift.campaign.records import Proposal, Record, Request
from nightshift.config.allowlist import find_key
from nightshift.config.scope import is_within, require_valid, require_within, scope_of
from nightshift.config.train_toml import parse, set_values
from nightshift.errors import UsageError
from nightshift.experiment.experiment import Controller
from nightshift.night.loop import Night
from nightshift.night.start import begin
from nightshift.night.state import FILL, NightRequest, Stop
from tests.stand_in_controller import with_bench, write
from tests.stand_in_proposer import StandInProposer
from tests.unit import test_night_agent
from tests.unit.test_night_agent import Timed

controller = test_night_agent.controller
LR, DECAY = "trainer.optim.lr", "trainer.optim.weight_decay"
OUTSIDE: dict[str, object] = {
    "seq_len": 1024,
    "orchestrator.group_size": 8,
    "trainer.optim.max_norm": 0.5,
}


def a_night(controller: Controller, proposer: Proposer, **asked: object) -> tuple[Stop, list[Record]]:
    controller = with_bench(controller, executor=Timed(1, controller.clock, 15.0))
    state = begin(NightRequest("stand-in", **asked), controller)
    night = Night(state, controller, proposer, lambda text: None, filler=SearchProposer("tpe", 0))
    return night.run(), controller.ledger.records()


class Misbehaving(StandInProposer):
    """A stand-in for an agent that ignores the direction: three changes outside of it at once, then one within."""

    is_instant = False

    def __init__(self) -> None:
        self.contexts = list[Context]()

    def propose(self, context: Context) -> Proposing:
        yield
        self.contexts.append(context)
        changes = [{LR: 3e-6}] if context.refusals else [{key: value} for key, value in OUTSIDE.items()]
        proposal = Proposal(description="mine")
        return tuple(Answer(set_values(context.source, change), proposal) for change in changes)


def test_all_proposals_outside_the_scope_are_rejected(controller: Controller) -> None:
    proposer = Misbehaving()
    _, records = a_night(controller, proposer, experiments=2, only=f"{LR}, trainer.scheduler")
    [refusal] = proposer.contexts[1].refusals
    assert [f"outside the user's direction: {key} may not change" in refusal for key in OUTSIDE] == [True] * 3
    assert refusal.count(f"Change keys of {LR}, trainer.scheduler only.") == 3
    assert proposer.contexts[0].direction == f"Only: {LR}, trainer.scheduler"
    assert [[*record.run.new.keys] for record in records if record.run.new] == [[LR]]


class Away(StandInProposer):
    """A stand-in for an agent that cannot be asked."""

    is_instant = False

    def answer(self, context: Context) -> Answer:
        return Answer(None, cause="limit", unavailable=Availability(Meaning.LIMIT, "limit"))


def test_tpe_fills_the_slots_within_the_scope_also_beside_a_free_direction(controller: Controller) -> None:
    scope = f"{LR},{DECAY},trainer.optim.max_norm"
    _, records = a_night(controller, Away(), experiments=9, only=scope, direction="try the optimizer only")
    fills = [record for record in records if record.proposal.proposer == FILL]
    assert len(fills) >= 3
    keys = {key for record in fills if record.run.new for key in record.run.new.keys}
    assert keys <= {*scope.split(",")}


def test_without_a_scope_tpe_does_not_fill_beside_a_direction(controller: Controller) -> None:
    _, records = a_night(controller, Away(), hours=0.1, direction="try the optimizer only")
    assert not [record for record in records if record.proposal.proposer == FILL]


def test_run_py_rejects_a_change_outside_the_directions_scope(controller: Controller) -> None:
    controller.run(Request(only=("trainer.scheduler",)))
    write(controller, "3e-6")
    with pytest.raises(UsageError, match=rf"direction: {LR} may not change\. Change keys of trainer\.scheduler only\."):
        controller.run(Request(only=("trainer.scheduler",)))
    record = controller.run(Request(only=("trainer.scheduler", LR)))
    assert record.run.new.keys == {LR: "3e-6"}


@pytest.mark.parametrize("line", [f"**Only:** `{LR}`, `max_steps`", f"- only: {LR},max_steps."])
def test_a_line_of_markdown_is_a_scope_too(line: str) -> None:
    assert scope_of(f"{line}\nBe careful.") == (LR, "max_steps")
    require_valid(f"{line}\nBe careful.")


@pytest.mark.parametrize("line", ["Only: ,", "**Only:**"])
def test_a_scope_without_names_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match="Only: names no key"):
        require_valid(f"{line}\n- {LR}")
    require_valid("Only small steps: lr first")


def test_a_scope_contains_what_follows_from_its_keys() -> None:
    shipped = (Path(__file__).parents[2] / "train.toml").read_bytes()
    linear = {"trainer.scheduler.type": "linear", "trainer.scheduler.decay_steps": 20, "max_steps": 60}
    config = parse(set_values(shipped, linear))
    require_within(["trainer.scheduler"], linear, config)
    require_within(["trainer.scheduler.type"], linear, config)
    with pytest.raises(UsageError, match="max_steps may not change"):
        require_within(["trainer.scheduler.decay_steps"], ["max_steps"], config)
    require_within([LR], ["trainer.optim.mu"], config)  # it does not apply: a variant was left
    assert is_within([], LR)
    assert is_within(["trainer"], LR)
    assert not is_within(["trainer.optim.l"], LR)
    assert all(find_key(key) for key in OUTSIDE)
