"""What is taken over from an agent, and what its process is given."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from nightshift.agents.agent import agent_environment, complete, open_agent
from nightshift.agents.brief import notes_path
from nightshift.agents.clone import Clone
from nightshift.agents.notebook import parse_answer
from nightshift.agents.presets import command_of
from nightshift.campaign.git import Repo
from nightshift.config.train_toml import parse
from nightshift.errors import UsageError
from nightshift.experiment.checkout import checked_head
from tests.campaigns import context_of
from tests.conftest import git


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", {}),
        ("HYPOTHESIS: a\nPREDICTION: b\nLESSON 0002: c\n", {"description": "a", "prediction": "b"}),
        ("HYPOTHESIS: a: b PREDICTION: +1 pp LESSON: c", {"description": "a: b", "prediction": "+1 pp"}),
        ("**HYPOTHESIS:** a\n- **PREDICTION**: b", {"description": "a", "prediction": "b"}),
        ("HYPOTHESIS: <what you change>\nPREDICTION: <the effect>", {}),
        ("HYPOTHESIS: <form>\n...\nHYPOTHESIS: first\nHYPOTHESIS: last\n", {"description": "last"}),
        ("HYPOTHESIS: \x1b[31mred\x07\u202e\tand  wide", {"description": "red and wide"}),
        ("HYPOTHESIS" + 400_000 * " ", {}),  # read in one go
        ("HYPOTHESIS: " + "x" * 1000, {"description": "x" * 237 + "..."}),
    ],
)
def test_the_answer_is_found_in_what_agents_write(text: str, answer: dict[str, str]) -> None:
    assert parse_answer(text)[0] == answer


@pytest.mark.parametrize(
    ("agent", "options"),
    [("no-such-agent", {}), ("", {}), ("sh 'unclosed", {}), ("sh -c x", {"model": "x"}), ("sh", {"effort": "x"})],
)
def test_a_command_that_cannot_be_run_and_an_option_that_it_lacks_are_refused(agent: str, options: Any) -> None:
    with pytest.raises(UsageError, match="--agent" + "".join(f"-{name}: Nightshift knows no" for name in options)):
        command_of(agent, **{"is_contained": False, "model": None, "effort": None} | options)


def test_the_environment_is_the_persons_without_what_points_elsewhere() -> None:
    person = {"API_KEY": "secret", "GIT_DIR": "x", "GIT_INDEX_FILE": "x", "PWD": "x", "PATH": "p"}
    assert agent_environment(person, Path("/clone/here")) == {
        "API_KEY": "secret",
        "PATH": "p",
        "PWD": "/clone/here",
        "GIT_CEILING_DIRECTORIES": "/clone",
    }


@pytest.fixture
def clone(checkout: Path, tmp_path: Path) -> Clone:
    """Not made yet."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    return Clone(Repo(checkout), temporary)


def test_a_clone_is_private_fresh_and_gone_afterwards(checkout: Path, clone: Clone) -> None:
    clone.open(b"lr = 7\n", {})
    assert stat.S_IMODE(clone.folder.parent.stat().st_mode) == 0o700
    assert (clone.path / "train.toml").read_bytes() == b"lr = 7\n"
    with pytest.raises(UsageError, match=r"is the temporary clone of an agent, in which no experiment may run\. Edit"):
        checked_head(Repo(clone.path))
    (clone.path / "folder").mkdir(mode=0o500)
    clone.open(b"lr = 8\n", {})
    assert not (clone.path / "folder").exists()
    clone.clear()
    assert list(clone.folder.parent.iterdir()) == []
    assert git(checkout, "status", "--porcelain") == ""


def test_logs_are_read_only_and_the_branchs_notes_are_not_the_agents(checkout: Path, clone: Clone) -> None:
    (checkout / "notes.md").write_text("of the user\n")
    git(checkout, "add", "notes.md")
    git(checkout, "commit", "-qm", "notes")
    clone.open(b"lr = 7\n", {"0001-curves.tsv": b"step\n"})
    assert not (clone.path / "notes.md").exists()
    assert stat.S_IMODE((clone.path / "logs" / "0001-curves.tsv").stat().st_mode) == 0o444


def test_a_clone_of_somebody_else_is_not_used(checkout: Path, clone: Clone) -> None:
    clone.folder.parent.symlink_to(checkout)
    with pytest.raises(Exception, match="not a private folder of this user"):
        clone.open(b"lr = 1\n", {})
    with pytest.raises(UsageError, match="is inside the checkout"):
        Clone(Repo(checkout), checkout / "runs")


def test_a_link_in_place_of_the_clone_is_removed_not_followed(clone: Clone, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "read-only").touch(mode=0o400)
    clone.open(b"lr = 1\n", {})
    clone.folder.rename(tmp_path / "moved")
    clone.folder.symlink_to(precious)
    clone.clear()
    assert not clone.folder.is_symlink()
    assert stat.S_IMODE((precious / "read-only").stat().st_mode) == 0o400


GRID = r"""
number=1
for lr in 1e-6 6e-6; do
  for batch in 128 512; do
    sed -e "s/^lr = .*/lr = $lr/" -e "s/^batch_size = .*/batch_size = $batch/" train.toml > proposal-$number.toml
    printf 'HYPOTHESIS: corner %s\n' "$number" > proposal-$number.txt
    number=$((number + 1))
  done
done
printf 'LESSON 0002: rates\n' >> proposal-1.txt
echo 'next: the schedule' > notes.md
"""


def test_an_agent_answers_with_a_grid_lessons_and_notes(checkout: Path, clone: Clone, tmp_path: Path) -> None:
    script = tmp_path / "grid.sh"
    script.write_text(GRID)
    agent = open_agent(f"sh {script}", "none", checkout, dict(os.environ), 60.0, clone, (), ())
    context = context_of(tmp_path / "campaign", ["3e-6"], num_proposals=2)
    answers = complete(agent.ask("a prompt", context, {}))
    assert [answer.proposal.description for answer in answers] == [f"corner {n}" for n in range(1, 5)]
    configs = [parse(answer.source) for answer in answers]
    values = {(each.get("trainer.optim.lr"), each.get("orchestrator.batch_size")) for each in configs}
    assert values == {(rate, batch) for rate in (1e-6, 6e-6) for batch in (128, 512)}
    assert answers[0].lessons == {2: {"lesson": "rates"}}
    assert answers[0].proposal.notes == ()
    assert notes_path(context).read_text() == "next: the schedule"
