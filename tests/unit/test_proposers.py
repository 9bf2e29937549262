"""The searches propose from the ledger and a seed alone, inside the search space, and learn from the scores."""

import math
import random
from pathlib import Path

import pytest

from nightshift.agents.base import Answer, Context, Proposer
from nightshift.agents.search import SearchProposer, scores, space_of
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import Ledger
from nightshift.config.train_toml import diff, parse, set_values
from tests import campaigns
from tests.campaigns import context_after, replace, tell

LR, GROUP = "trainer.optim.lr", "orchestrator.group_size"
TEMPERATURE = "orchestrator.train.sampling.temperature"
USED = frozenset({LR, GROUP, TEMPERATURE})
NAMES = ["random", "tpe"]


def context_of(root: Path, rates: list[str]) -> Context:
    return campaigns.context_of(root, rates, used_keys=USED)


def propose(proposer: Proposer, context: Context) -> bytes:
    proposal = proposer.answer(context)
    assert proposal.cause is None
    assert proposal.source is not None
    return proposal.source


@pytest.mark.parametrize("name", NAMES)
def test_the_same_ledger_and_seed_give_the_same_proposal_and_nothing_else_does(name: str, tmp_path: Path) -> None:
    context = context_of(tmp_path, ["3e-6", "1e-5"])
    first = propose(SearchProposer(name, 7), context)
    start, *others = context.campaign.decided
    before = Campaign.of([start, *others[:-1]], start.branch, start.rules_hash)  # without the last experiment
    assert propose(SearchProposer(name, 7), context_of(tmp_path / "again", ["3e-6", "1e-5"])) == first
    different = (
        propose(SearchProposer(name, 8), context),
        propose(SearchProposer(name, 7), replace(context, refusals=("tried",))),
        propose(SearchProposer(name, 7), replace(context, campaign=before)),
    )
    assert first not in different


@pytest.mark.parametrize("name", NAMES)
def test_a_proposal_is_a_valid_train_toml_within_the_space_and_says_what_it_changes(name: str, tmp_path: Path) -> None:
    context = context_of(tmp_path, ["3e-6"])
    for attempt in range(5):
        proposal = SearchProposer(name, 0).answer(replace(context, refusals=("x",) * attempt))
        changed = parse(proposal.source)
        assert space_of(context).places(changed).keys() == USED
        assert b"# poor" in proposal.source  # comments stay
        changes = diff(parse(context.source), changed)
        assert {change.key for change in changes} <= USED
        assert proposal.proposal.description == f"{name}: {', '.join(change.line for change in changes)}"


def test_scores_are_posterior_means_and_a_crash_counts_as_the_worst(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    tell(ledger, {}, 0.54)
    tell(ledger, {LR: 3e-6}, 0.60)
    rider = tell(ledger, {GROUP: 8}, 0.55).run.new
    tell(ledger, {TEMPERATURE: 0.9}, 0.62, rider=rider)
    tell(ledger, {LR: 1e-4}, None)
    context = context_after(ledger)
    configs, means = zip(*scores(context), strict=True)
    posterior = context.campaign.posterior
    expected = [posterior.predict(record.run.changes)[0] for record in context.campaign.decided[:4]]
    assert list(means) == [*expected, min(expected)]
    assert expected == pytest.approx([0.54, 0.60, 0.55, 0.61], abs=0.025)
    assert [config.get(GROUP) for config in configs] == [4, 4, 8, 8, 4]  # with the rider
    assert configs[1].get(LR) == 3e-6


def test_tpe_learns_where_the_learning_rate_is_good_and_random_does_not(tmp_path: Path) -> None:
    """On a made-up campaign whose score falls with the distance of log lr from 3e-6."""
    good = {}
    ledger, source = Ledger(tmp_path), random.Random(3)
    for rate in (10 ** source.uniform(-7, -4) for _ in range(26)):
        tell(ledger, {LR: float(f"{rate:.2e}")}, 0.9 - abs(math.log10(rate / 3e-6)) / 2)
    context = context_after(ledger, used_keys=frozenset({LR}))
    for name in NAMES:
        good[name] = 0
        for incumbent, is_low in ((1e-6, True), (9e-6, False)):
            seen = replace(context, source=set_values(context.source, {LR: incumbent}))
            rates = [parse(propose(SearchProposer(name, seed), seen)).get(LR) for seed in range(8)]
            assert all(0.3 < rate / incumbent < 3.1 for rate in rates)
            good[name] += sum((rate > incumbent) == is_low for rate in rates)
    assert good["tpe"] >= 14
    assert good["random"] <= 12


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rates", [[], ["3e-6"] + [f"{n}e-5" for n in range(1, 10)]], ids=["baseline", "ten runs"])
def test_proposals_in_flight_or_waiting_give_other_proposals(name: str, rates: list[str], tmp_path: Path) -> None:
    """So that several slots are filled, right after the baseline too."""
    context = context_of(tmp_path, rates)
    proposed = list[bytes]()
    for number in range(3):
        proposed.append(propose(SearchProposer(name, 5), context))
        context = replace(context, waiting=(*context.waiting, Answer(proposed[-1], number=number)))
    running = replace(context, waiting=(), in_flight=context.campaign.decided[-1:])
    assert len({*proposed}) == 3
    assert parse(propose(SearchProposer(name, 5), running)).hash != context.configs[running.in_flight[0].number].hash
    empty = replace(context, waiting=(Answer(None),))
    assert propose(SearchProposer(name, 5), empty)


def test_keys_that_do_not_agree_are_drawn_again(tmp_path: Path) -> None:
    """The batch of this incumbent is divisible by one of the two steps."""
    context = context_of(tmp_path, [])
    source = set_values(context.source, {"orchestrator.batch_size": 66, GROUP: 6})
    context = replace(context, source=source, used_keys=frozenset({GROUP}))
    groups = {parse(propose(SearchProposer("random", seed), context)).get(GROUP) for seed in range(20)}
    assert groups == {3}
    stuck = replace(context, source=set_values(source, {"orchestrator.batch_size": 65, GROUP: 5}))
    assert "do not divide a batch of 65" in (SearchProposer("random", 0).answer(stuck).cause or "")


def test_a_search_says_when_every_step_was_tried(tmp_path: Path) -> None:
    context = campaigns.context_of(tmp_path, [], used_keys=frozenset({GROUP}))
    for value in (2, 8):
        assert SearchProposer("random", 0).answer(context).source
        tell(context.ledger, {GROUP: value}, 0.2)
        context = replace(context_after(context.ledger), used_keys=frozenset({GROUP}))
    assert SearchProposer("random", 0).answer(context).cause == "no change by one step is left to try"
