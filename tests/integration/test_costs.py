"""Whole nights whose agents, shell scripts, say what they cost as Claude Code, Codex and Gemini CLI do."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.night.state import load, night_cost
from tests.agent_outputs import CLAUDE, CODEX, GEMINI
from tests.night_checkout import good_night, nightshift, records

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
    stdout, stderr = good_night(
        root, agent=command, sandbox="none", max_cost=1.0, experiments=20, fill=False, page=True
    )
    first, *others = records(root)
    assert [record.proposal.description for record in others] == ["call 0", "call 1", "call 3", "call 4"]
    assert first.proposal.cost is None
    costs = [record.proposal.cost for record in others]
    claude, codex, gemini = (15_512, 812, 0.4), (26_549, 1_590, None), (25_939, 174, None)
    figures = [(cost.tokens_in, cost.tokens_out, cost.dollars) for cost in costs if cost]
    assert figures == [claude, codex, gemini, claude]
    assert all(cost and cost.seconds and cost.seconds > 0 for cost in costs)
    state = load(Ledger(root))
    assert state is not None
    assert state.cause == "--max-cost 1 is reached"
    cost = night_cost(state, Ledger(root))
    assert (cost.num_proposals, cost.tokens_in) == (5, 3 * 15_512 + 26_549 + 25_939)
    assert stderr.count("is not enforced: ") == 2
    sentence = str(cost)
    assert re.fullmatch(r"\S+ h of agents, 5 proposals, 99,024 tokens in, 4,200 tokens out, at least \$1\.20", sentence)
    assert f"h of runs, {sentence}\n" in stdout.rpartition("cost: ")[2]
    assert sentence in " ".join(nightshift(root, "status")[1].split())
    assert f"h of runs, {sentence}." in (root / "runs" / "report.html").read_text()
