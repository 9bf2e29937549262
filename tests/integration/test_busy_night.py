"""Whole nights on a machine that others use: a busy run is repeated once, when it is calm, and never for being slow.

What others took of each run, and whether the machine is calm, is what a stand-in says: see stand_in_night.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.scores import taken
from tests.conftest import CAMPAIGN
from tests.night_checkout import finish, is_running, leftovers, problems, records, start, state, whole_night
from tests.stand_ins import fault
from tests.waiting import wait_for

ASKED = {"agent": "lr", "proposer": "lr"}


def others_take(root: Path, *shares: float) -> None:
    """Of the runs to come, in turn."""
    (root / "stand-in-load.json").write_text(json.dumps(shares))


def test_a_busy_run_is_repeated_once_and_both_are_believed(root: Path) -> None:
    others_take(root, 0.0, 0.6, 0.0)
    code, _, stderr = whole_night(root, experiments=4, **ASKED)
    assert code == 0, stderr
    assert problems(root) == []
    first, busy, again, last = records(root)
    assert [taken(record) for record in (first, busy, again, last)] == [0.0, 0.6, 0.0, 0.0]
    assert "busy machine: 60% of the processors' time went to other processes" in (busy.health or "")
    assert "0002 again, which was run on a busy machine" in stderr
    assert again.proposal.description == "0002 again, which was run on a busy machine: lr 1e-06"
    assert (again.config_hash, again.effective_hash) == (busy.config_hash, busy.effective_hash)
    assert busy.result.seed != again.result.seed, "another seed"  # type: ignore[union-attr]
    assert (root / "runs" / "0003" / "train.toml").read_bytes() == (root / "runs" / "0002" / "train.toml").read_bytes()
    assert last.proposal.description == "lr 6e-06", "the proposer goes on, and nothing is repeated twice"
    campaign = Campaign.of(records(root), CAMPAIGN, first.rules_hash)
    assert [record.number for record in campaign.decided] == [1, 2, 3, 4]
    assert len(campaign.seeds_of(busy.effective_hash)) == 2
    assert busy.status == "keep"
    assert again.judgement
    assert again.judgement.why.startswith("the settings of 0002: one more run of it")


def test_a_machine_that_has_become_calm_has_it_repeated_then(root: Path) -> None:
    others_take(root, 0.0, 0.6)
    sign = root / "stand-in-busy"
    sign.touch()
    night = start(root, experiments=6, **ASKED)
    wait_for(lambda: len(records(root)) >= 3)  # 0002 is decided, and was not repeated
    sign.unlink()
    code, _, stderr = finish(night)
    assert code == 0, stderr
    told = [record.proposal.description for record in records(root)]
    assert told[2] == "lr 3e-05"
    assert [line.startswith("0002 again") for line in told].count(True) == 1, told


def test_a_kill_before_the_repetition_is_decided_leaves_it_to_the_next_start(root: Path) -> None:
    """Its config was decided by the busy run; that decides nothing of the repetition."""
    others_take(root, 0.0, 0.6)
    (root / "stand-in-busy").touch()
    assert whole_night(root, experiments=2, **ASKED)[0] == 0
    (root / "stand-in-busy").unlink()
    night_json = state(root)
    night_json |= {"cause": None, "request": {**night_json["request"], "experiments": 3}}
    (root / "runs" / "night.json").write_text(json.dumps(night_json))  # not over: one more was asked for
    fault(root, "hold", once=False)
    night = start(root, experiments=3, **ASKED)
    wait_for(lambda: is_running(root, 3))
    assert state(root)["pending"][0]["repeats"] == 2
    night.kill()
    finish(night)
    (root / "stand-in.json").unlink()
    wait_for(lambda: not leftovers(root))
    assert state(root)["pending"][0]["repeats"] == 2
    code, _, stderr = whole_night(root, experiments=3, **ASKED)
    assert code == 0, stderr
    assert "going on with the night of" in stderr
    ours = records(root)
    assert [record.failure for record in ours] == [None, None, "interrupted", None]
    assert ours[3].proposal.description.startswith("0002 again")
    assert state(root)["pending"] == []
    assert problems(root) == []
