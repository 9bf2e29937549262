"""What a table says of an experiment now, beside what its verdict said then."""

from functools import reduce
from itertools import pairwise

import pytest

from nightshift.campaign.campaign import Campaign, expected
from nightshift.campaign.records import Record
from nightshift.campaign.standing import Expected, effect_at_decision
from tests.campaigns import replace
from tests.recorded_nights import records

from replay import replay  # isort: skip  tests.recorded_nights finds it


def fold(name: str) -> list[Campaign]:
    """The recorded campaign after each of its decisions, which are made again from one run of the baseline."""
    steps = [Campaign()]
    for record in replay(records(name), {}).decided:
        steps.append(steps[-1].step(record))
    return steps[1:]


@pytest.mark.parametrize("name", ["random-0", "tpe-0"])
def test_right_after_a_verdict_both_are_the_same_unless_that_moved_the_incumbent(name: str) -> None:
    for campaign in fold(name)[1:]:
        record = campaign.decided[-1]
        then, now = effect_at_decision(record), expected(campaign, record)
        assert then is not None
        assert now == pytest.approx(then, abs=1e-6)


@pytest.mark.parametrize("name", ["random-0", "tpe-0"])
def test_what_is_forgotten_keeps_what_was_believed_of_it_last(name: str) -> None:
    steps = fold(name)
    seen = dict[int, Expected]()
    for before, after in pairwise(steps):
        gone = before.ideas.keys() - after.ideas.keys()
        assert gone <= after.last_expected.keys()
        for record in before.decided:
            if record.number in gone and (told := expected(before, record)):
                seen[record.number] = told
    assert len(seen) > 5
    last = steps[-1]
    assert {r.number: expected(last, r) for r in last.decided if r.number in seen} == seen


def test_the_baseline_a_crash_and_a_repeat_have_neither() -> None:
    last = fold("tpe-0")[-1]
    assert expected(last, last.kept[0]) is effect_at_decision(last.kept[0]) is None


def test_later_runs_move_it() -> None:
    last = fold("tpe-0")[-1]
    sixteen: Record = next(r for r in last.decided if r.number == 16)
    then, now = effect_at_decision(sixteen), expected(last, sixteen)
    assert then is not None
    assert now is not None
    assert then.mean - now.mean > 0.005  # it was lucky: what was tried on it told so


def test_a_campaign_is_the_fold_of_its_steps() -> None:
    last = fold("tpe-0")[-1]
    assert reduce(Campaign.step, last.decided, Campaign()).last_expected == last.last_expected


def test_what_is_believed_of_a_set_of_known_ideas_moves_too() -> None:
    """A set of known ideas has no idea of its own: what is believed of it is what is believed of its ideas."""
    last = fold("tpe-0")[-1]
    # The incumbent without any idea: the baseline's set.
    shown = replace(last.decided[-1], number=31, decided=31, base=(), diff=(), config_hash="a", effective_hash="b")
    once = last.step(shown)
    then = expected(once, shown)
    twice = once.step(replace(shown, number=32, decided=32))
    assert then is not None
    assert expected(twice, shown) != then
    assert last.incumbent is not None
    assert expected(twice, shown).mean == pytest.approx(float(twice.belief.difference(0, twice.belief.incumbent)[0]))
