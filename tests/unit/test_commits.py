"""One commit for each decision about one change, on real git repositories."""

import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nightshift.campaign import commits
from nightshift.campaign.commits import commit, decisions_since
from nightshift.campaign.git import Repo
from nightshift.campaign.records import Action, Change, Decision, PlannedCommit
from nightshift.config.train_toml import Config, parse, set_values
from nightshift.errors import ConfigError, UsageError
from tests.checkouts import git, small_checkout
from tests.train_tomls import SHIPPED

LR, DECAY, KL = "trainer.optim.lr", "trainer.optim.weight_decay", "trainer.loss.kl_tau"
BATCH, GROUP = "orchestrator.batch_size", "orchestrator.group_size"
TYPE, WARMUP = "trainer.scheduler.type", "trainer.scheduler.warmup_steps"
BASELINE = parse(SHIPPED)
plan = partial(commits.plan, reason=lambda decision: "", validate=lambda config: None)


def change(experiment: int, **keys: str | None) -> Change:
    """A change of keys by their short names."""
    names = {"lr": LR, "decay": DECAY, "kl": KL, "batch": BATCH, "group": GROUP, "type": TYPE, "warmup": WARMUP}
    return Change(experiment=experiment, keys={names.get(key, key): value for key, value in keys.items()})


def decision(action: Action, change: Change, effect: float = 0.01) -> Decision:
    return Decision(change=change, action=action, effect=effect, effect_stderr=0.01)


def keep(change: Change, effect: float = 0.01) -> Decision:
    return decision(Action.KEEP, change, effect)


def revert(change: Change, effect: float = -0.01) -> Decision:
    return decision(Action.REVERT, change, effect)


class Branch:
    """A campaign's branch with the shipped train.toml, and the changes that are kept on it."""

    def __init__(self, folder: Path) -> None:
        self.repo = Repo(small_checkout(folder, SHIPPED))
        self.start = self.repo.head()
        self.kept: tuple[Change, ...] = ()
        self.ours: list[str] = []

    def decide(self, *decisions: Decision) -> list[PlannedCommit]:
        steps, _, kept, refused = plan(BASELINE, self.kept, decisions)
        assert refused == []
        head = self.repo.head()
        done = commit(self.repo, head, steps)
        assert commit(self.repo, head, steps) == done  # as after a kill
        self.ours += [name for name in done if name]
        self.kept = kept
        (self.repo.root / "train.toml").write_bytes(self.config().source)
        return steps

    def config(self) -> Config:
        return parse(self.repo.config_at("HEAD") or b"")

    def subjects(self) -> list[str]:
        return git(self.repo.root, "log", "--reverse", "--format=%s", f"{self.start.commit}..").splitlines()

    def edit(self, keys: dict[str, Any], message: str = "mine") -> str:
        """A commit of the user's own."""
        (self.repo.root / "train.toml").write_bytes(set_values(self.config().source, keys))
        git(self.repo.root, "commit", "--quiet", "--allow-empty-message", "-m", message, "--", "train.toml")
        return git(self.repo.root, "rev-parse", "HEAD").strip()

    def by_user(self) -> list[tuple[str, dict[str, str | None]]]:
        """What the user's commits decide: action, keys."""
        found = decisions_since(self.repo, [], self.start.branch, BASELINE, self.kept)
        assert {each.commit for each in found} <= {self.repo.head().commit}
        return [(str(each.action), each.change.keys) for each in found]


@pytest.fixture
def branch(tmp_path: Path) -> Branch:
    return Branch(tmp_path)


def test_a_commit_changes_the_lines_of_its_change_only(branch: Branch) -> None:
    branch.decide(keep(change(12, lr="5e-6")))
    assert branch.config().source == SHIPPED.replace(b"lr = 3e-6", b"lr = 5e-6")
    branch.decide(revert(change(12, lr="5e-6")))
    assert branch.config().source == SHIPPED
    assert branch.subjects() == ["keep 0012: lr 3e-6 → 5e-6", "revert 0012: lr 5e-6 → 3e-6"]


def test_commits_come_in_the_order_of_the_decisions(branch: Branch) -> None:
    first, second = change(1, lr="1e-6"), change(2, decay="0.1")
    branch.decide(keep(first, 0.01), keep(second, 0.02))
    adopted = decision(Action.ADOPT, change(3, kl="0.01"), 0.03)
    discarded = decision(Action.DISCARD, change(5, kl="0.5"), 0.09)
    branch.decide(discarded, revert(second, -0.02), revert(first, -0.03), keep(change(4, batch="512"), 0.02), adopted)
    names = [subject.partition(":")[0] for subject in branch.subjects()]
    assert names == ["keep 0001", "keep 0002", "revert 0002", "revert 0001", "keep 0004", "adopt 0003"]


def test_a_shared_key_goes_back_to_the_kept_change_below(branch: Branch) -> None:
    first, second, third = change(1, lr="4e-6", decay="0.1"), change(2, lr="5e-6"), change(3, lr="6e-6", kl="0.01")
    for each in (first, second, third):
        branch.decide(keep(each))
    branch.decide(revert(first))  # a later change holds its lr
    assert (branch.config().get(LR), branch.config().get(DECAY)) == (6e-6, 0.01)
    branch.decide(revert(third))
    assert (branch.config().get(LR), branch.config().get(KL)) == (5e-6, 1e-3)
    branch.decide(revert(second))
    assert branch.config().source == SHIPPED
    branch.decide(keep(change(4, lr="4e-6")))
    branch.decide(keep(change(5, lr="5e-6")))
    with pytest.raises(UsageError, match="0004 is replaced: later changes set its keys"):
        commits.revert(branch.repo, BASELINE, branch.kept, branch.kept[0])
    num_commits = len(branch.subjects())
    branch.decide(revert(change(4, lr="4e-6")))  # all its keys are overridden
    assert (len(branch.subjects()), branch.kept) == (num_commits, (change(5, lr="5e-6"),))


def test_a_commit_that_would_be_invalid_waits_for_the_one_that_it_needs(branch: Branch) -> None:
    cosine, warmup = change(1, type="cosine", max_steps="100"), change(2, warmup="20")
    branch.decide(keep(warmup, 0.05), keep(cosine, 0.01))
    branch.decide(revert(cosine, -0.05), revert(warmup, -0.01))
    names = [subject.partition(":")[0] for subject in branch.subjects()]
    assert names == ["keep 0001", "keep 0002", "revert 0002", "revert 0001"]
    assert branch.config().source == SHIPPED


def test_an_edit_of_the_user_is_not_overwritten(branch: Branch) -> None:
    steps, _, kept, _ = plan(BASELINE, (), [keep(change(1, lr="5e-6"), 0.03), keep(change(2, kl="0.01", batch="512"))])
    branch.edit({LR: 9e-6, BATCH: 128})
    done = commit(branch.repo, branch.start, steps)
    assert done == [None, branch.repo.head().commit]
    assert commit(branch.repo, branch.start, steps) == done
    assert [branch.config().get(key) for key in (LR, BATCH, KL)] == [9e-6, 128, 0.01]
    branch.kept = kept
    assert branch.by_user() == [("keep", {LR: "9e-6", BATCH: "128"})]


def test_what_the_users_commits_change_is_a_decision(branch: Branch) -> None:
    branch.decide(keep(change(1, lr="5e-6")))
    assert branch.by_user() == []
    branch.edit({KL: 0.1}, "keep 0009: mine\n\nNightshift-Experiment: 0009\n")
    branch.edit({BATCH: 128}, message="")
    git(branch.repo.root, "revert", "--no-edit", branch.ours[0])
    assert branch.by_user() == [("revert", {LR: "5e-6"}), ("keep", {KL: "0.1", BATCH: "128"})]
    (branch.repo.root / "train.toml").write_bytes(b"lr = ")
    git(branch.repo.root, "commit", "--quiet", "-m", "broken", "--", "train.toml")
    with pytest.raises(ConfigError):
        branch.by_user()
    (branch.repo.root / "train.toml").write_bytes(b"# a comment is no decision\n" + SHIPPED)
    git(branch.repo.root, "commit", "--quiet", "-m", "repaired", "--", "train.toml")
    assert branch.by_user() == [("revert", {LR: "5e-6"})]


def test_a_branch_that_was_reset_or_merged_is_one_edit(branch: Branch) -> None:
    branch.decide(keep(change(1, lr="5e-6")))
    first = branch.repo.head()
    branch.decide(keep(change(2, kl="0.01")))
    git(branch.repo.root, "reset", "--quiet", "--hard", f"{first.commit}")
    assert branch.by_user() == [("revert", {KL: "0.01"})]
    branch.kept = branch.kept[:1]
    assert branch.by_user() == []
    git(branch.repo.root, "switch", "--quiet", "-c", "side", f"{branch.start.commit}")
    branch.edit({BATCH: 128})
    git(branch.repo.root, "switch", "--quiet", first.branch)
    git(branch.repo.root, "merge", "--quiet", "--no-edit", "side")
    assert branch.by_user() == [("keep", {BATCH: "128"})]


def test_an_edit_of_some_keys_of_a_kept_change_is_a_change_of_the_users(branch: Branch) -> None:
    branch.decide(keep(change(1, lr="5e-6", kl="0.01")))
    branch.edit({LR: 4e-6})
    assert branch.by_user() == [("keep", {LR: "4e-6"})]
    branch.edit({LR: 3e-6, KL: 0.001, BATCH: 512})
    assert branch.by_user() == [("revert", {LR: "5e-6", KL: "0.01"}), ("keep", {BATCH: "512"})]


def test_revert_takes_out_what_git_revert_cannot_and_leaves_every_other_line(branch: Branch) -> None:
    """A later change set one of the keys, and another one added a line below."""
    branch.decide(keep(change(1, lr="5e-6", **{"trainer.optim.betas2": "0.99"})))
    branch.decide(keep(change(2, lr="6e-6")))
    branch.decide(keep(change(3, **{"trainer.optim.betas1": "0.8"})))
    with pytest.raises(subprocess.CalledProcessError):
        git(branch.repo.root, "revert", "--no-edit", branch.ours[0])
    git(branch.repo.root, "revert", "--abort")
    git(branch.repo.root, "config", "user.name", "Ada")
    before = branch.config().source
    commits.revert(branch.repo, BASELINE, branch.kept, branch.kept[0])
    removed = [line for line in before.splitlines() if line not in branch.config().source.splitlines()]
    assert removed == [b"betas2 = 0.99"]
    assert branch.by_user() == [("revert", branch.kept[0].keys)]
    assert (branch.repo.root / "train.toml").read_bytes() == branch.config().source
    assert git(branch.repo.root, "log", "-1", "--format=%an: %s").strip() == "Ada: Revert 0001: betas2 0.99 → 0.999"


def test_revert_overwrites_no_edit_and_waits_for_owed_commits(branch: Branch) -> None:
    first, second = change(1, lr="5e-6"), change(2, kl="0.01")
    branch.decide(keep(first))
    with pytest.raises(UsageError, match="not all decisions are committed to"):
        commits.revert(branch.repo, BASELINE, (first, second), first)
    path = branch.repo.root / "train.toml"
    path.write_bytes(mine := b"# mine\n" + branch.config().source)
    with pytest.raises(UsageError, match="has changes that are not committed"):
        commits.revert(branch.repo, BASELINE, branch.kept, first)
    assert path.read_bytes() == mine


@pytest.mark.parametrize("num_done", [0, 2, 3])
def test_a_call_repeated_after_a_kill_commits_each_step_once(branch: Branch, num_done: int) -> None:
    old = change(1, lr="4e-6")
    branch.decide(keep(old))
    head = branch.repo.head()
    # The revert and the first keep leave the values that were there before.
    steps = plan(BASELINE, branch.kept, [revert(old), keep(change(2, lr="4e-6"), 0.02), keep(change(3, kl="0.01"))])[0]
    first = commit(branch.repo, head, steps[:num_done])
    git(branch.repo.root, "commit", "--quiet", "--allow-empty", "-m", "of the user, elsewhere")
    again = commit(branch.repo, head, steps)
    assert again[:num_done] == first
    assert commit(branch.repo, head, steps) == again
    names = [subject.partition(":")[0] for subject in branch.subjects() if "user" not in subject]
    assert names == ["keep 0001", "revert 0001", "keep 0002", "keep 0003"]


def test_a_step_that_does_not_fit_an_edit_of_the_user_is_left_out(branch: Branch) -> None:
    steps, _, kept, _ = plan(BASELINE, (), [keep(change(1, batch="250", group="5")), keep(change(2, kl="0.01"))])
    branch.edit({BATCH: 128})
    done = commit(branch.repo, branch.start, steps)
    assert done == [None, branch.repo.head().commit] == commit(branch.repo, branch.start, steps)
    branch.kept = kept
    [(action, keys)] = branch.by_user()
    assert (action, keys[BATCH], {*keys}) == ("keep", "128", {BATCH, GROUP})
    assert (branch.config().get(BATCH), branch.config().get(GROUP)) == (128, BASELINE.get(GROUP))
