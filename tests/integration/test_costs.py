"""Whole nights whose agents, shell scripts, say what they cost as Claude Code, Codex and Gemini CLI do."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.night.state import load, night_cost
from tests.agent_outputs import CLAUDE, CODEX, GEMINI
from tests.night_checkout import good_night, nightshift, records, start, whole_night
from tests.stand_ins import fault
from tests.waiting import wait_for

# Changes the rate and the weight decay in turn, answers, and prints what lies in the file of its call; a call named in
# `lazy` edits nothing.
AGENT = r"""
folder=$1
call=$(cat "$folder/calls" 2>/dev/null || echo 0)
echo $((call + 1)) > "$folder/calls"
if ! grep -qx "$call" "$folder/lazy"; then
    sed -i '/^weight_decay/d' train.toml
    if [ $((call % 2)) = 0 ]; then sed -i "s/^lr = .*/lr = $((call + 2))e-6/" train.toml
    else printf '\nweight_decay = 0.0%s\n' $((call + 2)) >> train.toml; fi
    printf 'HYPOTHESIS: call %s\nPREDICTION: +1 pp\n' "$call" > hypothesis.txt
fi
cat "$folder/says-$call" 2>/dev/null || true
"""

# Of a team: does whatever it is asked for, and prints what lies in the file.
AGENT_OF_TEAM = r"""
number=$(sed -n 's/.*experiment,* 0*\([0-9][0-9]*\).*/\1/p' | head -n 1)
if [ $((number % 2)) = 0 ]; then sed -i "s/^lr = .*/lr = ${number}e-6/" train.toml
else printf '\nweight_decay = 0.0%s\n' "$number" >> train.toml; fi
printf 'HYPOTHESIS: another rate\nPREDICTION: +1 pp\nOUTCOME: better\nLESSON: higher is better\n' > hypothesis.txt
cat "$1"
"""


def agent(root: Path, says: Sequence[str], lazy: Sequence[int] = ()) -> str:
    folder = root.parent / "agent"
    folder.mkdir(exist_ok=True)
    (folder / "agent.sh").write_text(AGENT)
    (folder / "lazy").write_text("".join(f"{call}\n" for call in lazy))
    for call, text in enumerate(says):
        (folder / f"says-{call}").write_text(text)
    return shlex.join(["sh", str(folder / "agent.sh"), str(folder)])


@pytest.mark.slow
def test_a_night_stops_at_its_dollars_when_what_they_bought_is_run(root: Path) -> None:
    """Of $0.40 each; a refused proposal is paid for like another, and no dollars are no zero."""
    command = agent(root, [CLAUDE, CODEX, CLAUDE, GEMINI, CLAUDE, CLAUDE], lazy=[2])
    stdout, stderr = good_night(root, agent=command, sandbox="none", max_cost=1.0, experiments=20, page=True)
    first, *others = records(root)
    assert [record.proposal.description for record in others] == ["call 0", "call 1", "call 3", "call 4"]
    assert first.proposal.cost is None
    costs = [record.proposal.cost for record in others]
    assert [(cost.tokens_in, cost.tokens_out, cost.dollars) for cost in costs if cost] == [
        (15_512, 812, 0.4),
        (26_549, 1_590, None),
        (25_939, 174, None),
        (15_512, 812, 0.4),
    ]
    assert all(cost and cost.seconds and cost.seconds > 0 for cost in costs)
    state = load(Ledger(root))
    assert state is not None
    assert state.cause == "--max-cost 1: its proposals cost at least $1.20"
    cost = night_cost(state, Ledger(root))
    assert (cost.num_proposals, cost.tokens_in) == (5, 3 * 15_512 + 26_549 + 25_939)
    assert stderr.count("reported no dollars, so this rule cannot hold") == 1
    told = str(cost)
    assert re.fullmatch(r"5 proposals: \S+ h, 99,024 tokens in, 4,200 out, at least \$1\.20", told)
    assert f"h of runs; {told}\n" in stdout.rpartition("cost: ")[2]
    code, status, _ = nightshift(root, "status")
    assert code == 0
    assert told in " ".join(status.split())
    told_cost = json.loads(nightshift(root, "status", "--json")[1])["cost"]
    assert (told_cost["num_proposals"], told_cost["dollars"]) == (5, pytest.approx(1.2))
    assert told_cost["at_least"] == ["dollars"]
    page = (root / "runs" / "report.html").read_text()
    assert f"h of runs; {told}." in page
    assert "<dt>agents</dt><dd>at least $1.20<" in page
    assert told.replace("$", "\\$") in (root / "runs" / "report.md").read_text()


@pytest.mark.slow
def test_the_rules_bill_goes_on_after_a_kill(root: Path) -> None:
    asked = {"agent": agent(root, [CLAUDE] * 4), "sandbox": "none", "max_cost": 0.7, "experiments": 20}
    night = start(root, **asked)
    wait_for(lambda: any(record.proposal.cost for record in records(root)))
    night.kill()
    night.communicate()
    stdout, stderr = good_night(root, **asked)
    assert "going on with the night of" in stderr
    assert [record.proposal.cost.dollars for record in records(root) if record.proposal.cost] == [0.4, 0.4]
    assert "stopped:      --max-cost 0.7: its proposals cost $0.80" in stdout


@pytest.mark.slow
def test_a_run_that_the_machinery_lost_is_paid_once(root: Path) -> None:
    command = agent(root, [CLAUDE] * 4)
    assert whole_night(root, agent=command, sandbox="none", experiments=1)[0] == 0
    fault(root, "sigkill")
    stdout, _ = good_night(root, agent=command, sandbox="none", experiments=1)
    _, lost, again = records(root)
    assert (lost.failure, again.failure) == ("machinery", None)
    assert lost.config_hash == again.config_hash
    assert [record.proposal.cost.dollars if record.proposal.cost else None for record in (lost, again)] == [0.4, None]
    assert re.search(r"1 proposal: \S+ h, 15,512 tokens in, 812 out, \$0\.40\n", stdout)


@pytest.mark.slow
def test_what_one_of_a_team_does_not_tell_is_said_and_no_dollars_of_the_rule(root: Path) -> None:
    """The strategist tells dollars and tokens, the implementer tokens only."""
    folder = root.parent / "team"
    folder.mkdir()
    for name, text in (("claude", CLAUDE), ("codex", CODEX)):
        (folder / name).write_text(text)
        (folder / f"{name}.sh").write_text(AGENT_OF_TEAM)
    words = [shlex.join(["sh", str(folder / f"{name}.sh"), str(folder / name)]) for name in ("claude", "codex")]
    stdout, stderr = good_night(
        root, agent=f"team:{words[0]},{words[1]}", sandbox="none", max_cost=100.0, experiments=4, page=True
    )
    assert stderr.count("--max-cost 100: team:sh,sh reported not all dollars, so this rule cannot hold") == 1
    _, first, second, third = records(root)
    both = (15_512 + 26_549, 812 + 1_590)
    assert first.proposal.cost is not None
    assert (first.proposal.cost.tokens_in, first.proposal.cost.tokens_out, first.proposal.cost.dollars) == (*both, 0.4)
    assert first.proposal.cost.at_least == ("dollars",)
    assert second.proposal.cost is not None
    assert third.proposal.cost is not None
    dollars = (second.proposal.cost.dollars, third.proposal.cost.dollars)
    assert sorted(dollars) == pytest.approx([0.4, 0.8])  # one of them was asked what came of the first, too
    told = r"3 proposals: \S+ h, 141,695 tokens in, 8,018 out, at least \$1\.60"
    assert re.search(told, stdout.rpartition("cost: ")[2])
    assert "<dd>at least $1.60<small>by their own figures<" in (root / "runs" / "report.html").read_text()
