"""TPE and random: from the ledger and a seed alone, inside the search space, and no dumber than they must be."""

import math
import random
from pathlib import Path

import pytest

from nightshift.agents.base import Context, Proposer
from nightshift.agents.search import SearchProposer, scores, space_of
from nightshift.campaign.campaign import Campaign
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Judgement
from nightshift.config.train_toml import diff, parse
from nightshift.engines.base import used_keys
from nightshift.engines.trl.engine import TrlEngine
from tests import campaigns
from tests.campaigns import BASELINE, replace
from tests.rules import ARITHMETIC_TRL

USED = frozenset({"trainer.optim.lr", "orchestrator.group_size", "orchestrator.train.sampling.temperature"})
BOTH = ["random", "tpe", "search"]


def context_of(root: Path, rates: list[str]) -> Context:
    return campaigns.context_of(root, rates, used_keys=USED)


def propose(proposer: Proposer, context: Context) -> bytes:
    proposal = proposer.propose(context, lambda: False)
    assert proposal.cause is None
    assert proposal.source is not None
    return proposal.source


@pytest.mark.parametrize("name", BOTH)
def test_the_same_ledger_and_seed_give_the_same_proposal_and_nothing_else_does(name: str, tmp_path: Path) -> None:
    context = context_of(tmp_path, ["3e-6", "1e-5"])
    first = propose(SearchProposer(name, 7), context)
    assert propose(SearchProposer(name, 7), context_of(tmp_path / "again", ["3e-6", "1e-5"])) == first
    others = (
        propose(SearchProposer(name, 8), context),
        propose(SearchProposer(name, 7), replace(context, refusals=("tried",))),
        propose(SearchProposer(name, 7), replace(context, campaign=Campaign(context.campaign.decided[:-1]))),
    )
    assert first not in others


@pytest.mark.parametrize("name", BOTH)
def test_a_proposal_is_a_valid_train_toml_within_the_space_and_says_what_it_changes(name: str, tmp_path: Path) -> None:
    context = context_of(tmp_path, ["3e-6"])
    for attempt in range(5):
        proposal = SearchProposer(name, 0).propose(replace(context, refusals=("x",) * attempt), lambda: False)
        changed = parse(proposal.source)
        assert space_of(context).params(changed) is not None
        assert b"# poor" in proposal.source  # comments stay
        changes = diff(parse(context.source), changed)
        assert {change.key for change in changes} <= USED
        assert proposal.proposal.description == f"{name}: {'; '.join(change.line for change in changes)}"


def test_scores_are_posterior_means_and_a_crash_counts_as_the_worst(tmp_path: Path) -> None:
    context = context_of(tmp_path, ["3e-6", "1e-5"])
    *others, last = context.campaign.decided
    crash = replace(last, status="crash", judgement=Judgement(why="nan"))
    found = scores(replace(context, campaign=Campaign((*others, crash))))
    assert [round(score, 6) for _, score in found] == [0.35, 0.60, 0.35]
    assert found[1][0].get("trainer.optim.lr") == 3e-6
    assert scores(replace(context, campaign=Campaign((crash,)))) == []


def test_tpe_learns_where_the_learning_rate_is_good_and_random_does_not(tmp_path: Path) -> None:
    """On a made-up campaign whose score falls with the distance of log lr from 3e-6."""
    good = {}
    for name in BOTH:
        ledger, source = Ledger(tmp_path / name), random.Random(3)
        rates = [f"{10 ** source.uniform(-7, -4):.2e}" for _ in range(25)]
        context = context_of(tmp_path / name, rates)
        records = []
        for record in context.campaign.decided:
            rate = parse(ledger.source(record.number)).get("trainer.optim.lr")
            distance = abs(config_log(rate) - config_log(3e-6))
            judgement = Judgement(why="made up", delta=-distance, incumbent_score=0.9)
            records.append(replace(record, judgement=judgement))
        context = replace(context, campaign=Campaign(tuple(records)), used_keys=frozenset({"trainer.optim.lr"}))
        proposed = [propose(SearchProposer(name, seed), context) for seed in range(12)]
        distances = [abs(config_log(parse(p).get("trainer.optim.lr")) - config_log(3e-6)) for p in proposed]
        good[name] = sum(distance < 0.5 for distance in distances)
    assert good["tpe"] >= 9
    assert good["tpe"] > good["random"] + 2


def config_log(rate: float) -> float:
    return math.log10(rate)


def test_what_the_engine_uses_is_asked_of_the_engine(tmp_path: Path) -> None:
    used = used_keys(TrlEngine(ARITHMETIC_TRL, tmp_path, {}), parse(BASELINE))
    assert {"trainer.optim.lr", "trainer.optim.momentum", "max_steps", "trainer.scheduler.warmup_steps"} <= used
    assert used.isdisjoint({"trainer.loss.kl_tau", "orchestrator.max_off_policy_steps", "trainer.model.lora"})


def test_a_new_direction_is_a_random_draw(tmp_path: Path) -> None:
    context = context_of(tmp_path, ["3e-6"] + [f"{n}e-5" for n in range(1, 10)])
    assert propose(SearchProposer("tpe", 1), context) != propose(
        SearchProposer("tpe", 1), replace(context, new_direction=True)
    )


def test_a_record_of_an_older_allow_list_is_left_out(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    context = context_of(tmp_path, ["3e-6", "1e-5"])
    (ledger.run_dir(3) / "train.toml").write_bytes(BASELINE + b"gone = 1\n")
    assert len(scores(context)) == 2
    assert propose(SearchProposer("tpe", 0), context)
