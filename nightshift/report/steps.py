"""What to copy from a campaign and what to do next: sentences with commands, for page, report.md and terminal."""

import shlex
from collections.abc import Iterator
from contextlib import suppress

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import percent
from nightshift.campaign.results import gain_text
from nightshift.config.train_toml import Config, parse
from nightshift.errors import EngineError, UsageError
from nightshift.report.data import Morning, obsolete
from nightshift.report.text import Step, points


def next_steps(campaign: Campaign, agent: str, *, is_certified: bool) -> Iterator[Step]:
    """Yield what you may do next, in this order. `agent`: the proposer of the campaign. `is_certified`: the incumbent
    has a certificate."""
    if campaign.posterior is None:
        yield "Nothing is measured yet. Check this machine:", "uv run nightshift doctor"
        yield "Measure the baseline:", "uv run run.py"
        return
    if campaign.kept:
        yield "See what is kept, key by key:", "uv run nightshift diff baseline incumbent"
    else:
        yield "See what was tried:", "uv run nightshift history"
    yield from _doubtful(campaign)
    if campaign.kept and not is_certified:
        sentence = "Certify the gain of this incumbent with fresh seeds, on test problems that no run has used:"
        yield sentence, "uv run nightshift certify"
    yield "Continue the search:", f"uv run nightshift night --agent {shlex.quote(agent)} --hours 8"
    if campaign.kept and campaign.incumbent_run:
        yield "Take the weights home:", "uv run nightshift export --to model"


def _doubtful(campaign: Campaign) -> Iterator[Step]:
    """Yield the kept changes whose P(it helps) is now below that of a keep, with the command that takes each out."""
    assert campaign.posterior is not None
    keep_at = campaign.posterior.rules.keep_at
    changes = [(campaign.posterior.effect(change).p_helps, change) for change in campaign.kept]
    for p_helps, change in sorted(changes, key=lambda item: -item[0]):
        if p_helps < keep_at:
            why = f"P(it helps) is now {percent(p_helps)}, a keep needs {percent(keep_at)}"
            command = "git revert" if change.commit else "uv run nightshift revert"
            sentence = f"{change.name} is doubtful: {why}. To take it out, before you copy or certify:"
            yield sentence, f"{command} {(change.commit or change.name)[:7]}"


def has_certificate(ledger: Ledger, campaign: Campaign) -> bool:
    """Return True if the campaign's incumbent has a certificate that can be read."""
    with suppress(UsageError):
        certificates = (each for each in ledger.comparisons() if each.plan.split == "test")
        return any(obsolete(certificate, campaign) is None for certificate in certificates)
    return False


def nothing_to_copy(morning: Morning) -> str:
    """Return why there is nothing to copy: without a gain the baseline's train.toml is as good. Empty if there is."""
    certificate = morning.certificate if morning.is_certified else None
    if morning.standing is None:
        return "Nothing to copy: nothing is measured yet."
    if not morning.kept:
        return "Nothing to copy: no change is kept, so the incumbent's train.toml is the baseline's."
    if certificate and certificate.estimate.difference <= 0:
        return f"Nothing to copy: the certified gain is {points(certificate.estimate.difference)}."
    if not certificate and morning.standing.gain <= 0:
        return f"Nothing to copy: the estimated gain is {gain_text(morning.standing)}."
    return ""


def copied(morning: Morning) -> Iterator[Step]:
    """Yield the commands that show the incumbent's changes to train.toml and bring them to the main branch. A commit is
    named only if git has it and its train.toml trains as the campaign's does."""
    campaign, repo, branch = morning.story.campaign, Repo(morning.story.ledger.root), morning.story.branch
    if morning.configs is None or campaign.baseline is None or nothing_to_copy(morning):
        return
    commits = list[str]()
    for record in campaign.decided:
        commits += [decision.commit for decision in record.user_decisions if decision.commit]
        commits += record.commits.values()
    commits += [decision.commit for decision in campaign.user_decisions if decision.commit]
    first = campaign.baseline.commit or ""
    tips = [name for name in (*commits[-1:], branch) if _trains(repo, name, morning.configs[1])]
    is_in_git = bool(tips) and _trains(repo, first, morning.configs[0])
    if is_in_git:
        tip = tips[0][:10] if tips[0] in commits else tips[0]
        yield "The incumbent against the baseline:", f"git diff {first[:10]} {shlex.quote(tip)} -- train.toml"
    yield from _doubtful(campaign)
    if is_in_git and (command := _merge(repo, branch, tips[-1])):
        yield "To bring the kept commits to your main branch:", command


def _merge(repo: Repo, branch: str, tip: str) -> str:
    """Return the git command that brings the commits of `branch` up to `tip` to the default branch; empty if there is
    no other branch. A default branch that has moved since cannot be fast-forwarded."""
    with suppress(EngineError):
        main = next((name for name in repo.branches() if name != branch and repo.is_default(name)), None)
        if main is not None:
            is_behind = main in repo.branches("--merged", tip)
            words = f"merge --ff-only {shlex.quote(tip)}" if is_behind else f"cherry-pick {main}..{shlex.quote(tip)}"
            return f"git switch {shlex.quote(main)} && git {words}"
    return ""


def _trains(repo: Repo, commit: str, config: Config) -> bool:
    """Return True if the train.toml of a commit trains the same as `config`."""
    with suppress(UsageError, EngineError):
        source = repo.config_at(commit)
        return source is not None and parse(source).hash == config.hash
    return False
