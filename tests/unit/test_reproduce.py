"""reproduce, with stand-ins for the pool and the training process."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from nightshift import command
from nightshift.bundle import Bundle, Claim, read_bundle
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.verify import verify
from nightshift.certify.reproduce import Answer, Reproduction, describe, judged, make_plan, reproduce, summary
from nightshift.certify.run import certify
from nightshift.cli import commands
from nightshift.errors import Interrupted, UsageError
from nightshift.request import Request
from nightshift.sealed import counted_looks
from nightshift.setup import Setup
from tests.bundles import (
    RULES,
    bundled,
    make_kept,
)
from tests.conftest import git, living_children
from tests.stand_in_setup import SilentReporter, make_setup


@pytest.fixture
def kept(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """A campaign with one keep."""
    return make_kept(checkout, monkeypatch)


@pytest.fixture
def clone(kept: Setup, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Another checkout of the same repository, at the commit where the campaign began, without any record."""
    root = kept.root.parent / "clone"
    git(kept.root.parent, "clone", "--quiet", "--no-local", str(kept.root), str(root))
    commit = kept.ledger.records()[0].commit
    git(root, "switch", "--quiet", "--detach", str(commit))
    for name in ("environments", "models"):
        shutil.copytree(kept.root / name, root / name, symlinks=True) if (kept.root / name).is_dir() and not (
            kept.root / name
        ).is_symlink() else (root / name).symlink_to((kept.root / name).resolve())
    return make_setup(root, RULES, monkeypatch)


def test_a_belief_is_reproduced_in_another_clone_on_the_selection_set(kept: Setup, clone: Setup) -> None:
    bundle = read_bundle(bundled(kept))
    assert bundle.claim.source == "believed"
    found = reproduce(make_plan(bundle, clone, 2), clone)
    assert isinstance(found, Reproduction)
    assert found.num_seeds == {"baseline": 2, "incumbent": 2}
    assert found.difference > 0.1
    low, high = bundle.claim.interval
    assert found.is_inside == (low <= found.difference <= high)
    assert any("nothing was certified" in note for note in found.notes)
    assert counted_looks(clone.ledger.runs_dir) == []
    assert f"\nanswer:           {found.answer}: " in summary(found)
    assert verify(clone.ledger).problems == []
    seeds = {int(p.parent.name.rpartition("-")[2]) for p in clone.ledger.runs_dir.glob("reproduce/*/*/run.json")}
    assert len(seeds) == 4
    assert min(seeds) >= 20_000_000
    assert max(seeds) < 2**32
    again = reproduce(make_plan(bundle, clone, 2), clone)  # asked again for nothing
    assert again.difference == found.difference
    more = reproduce(make_plan(bundle, clone, 3), clone)
    fewer = reproduce(make_plan(bundle, clone, 1), clone)  # of what was made, no more than is asked for
    assert more.num_seeds == {"baseline": 3, "incumbent": 3}
    assert fewer.num_seeds == {"baseline": 1, "incumbent": 1}
    assert not any("lost" in note for each in (more, fewer) for note in each.notes)
    assert any("2 of 2 runs are done" in line for line in describe(make_plan(bundle, clone, 1), clone))
    assert living_children() == []


def test_seeds_that_somebody_chose_are_refused(kept: Setup, clone: Setup) -> None:
    bundle = read_bundle(bundled(kept))
    plan = make_plan(bundle, clone, 1)
    path = plan.pairs.folder / "seeds.json"
    path.parent.mkdir(parents=True)
    for planted in ("20000200", "7", str(10**30)):
        path.write_text(f'{{"first": {planted}}}')
        if int(planted) in range(20_000_000, 2**32):  # as a kill before its entry leaves it: drawn anew
            assert make_plan(bundle, clone, 1).pairs.first != int(planted)
        else:
            with pytest.raises(UsageError, match=r"seeds\.json is damaged"):
                make_plan(bundle, clone, 1)
    path.unlink()
    reproduce(make_plan(bundle, clone, 1), clone)
    assert any(b"seeds.json" in line for line in clone.ledger.chain.lines())
    path.write_text('{"first": 20000400}')
    with pytest.raises(UsageError, match=r"seeds\.json is not as the chain has it.*rm -r"):
        make_plan(bundle, clone, 1)
    assert any("seeds.json was changed" in problem for problem in verify(clone.ledger).problems)


def test_a_certificate_is_reproduced_on_the_sealed_set_and_counts_as_a_look(kept: Setup, clone: Setup) -> None:
    certify(kept, num_seeds=1)
    bundle = read_bundle(bundled(kept))
    assert bundle.claim.source == "certified"
    assert bundle.claim.num_seeds == 1
    plan = make_plan(bundle, clone)
    assert counted_looks(clone.ledger.runs_dir) == []  # a plan reads nothing sealed
    assert "sealed examples, which counts as a look here" in "\n".join(describe(plan, clone))
    found = reproduce(plan, clone)
    [look] = counted_looks(clone.ledger.runs_dir)
    assert bundle.sha256[:16] in look.branch
    assert found.answer == "holds"
    assert verify(clone.ledger).problems == []
    again = reproduce(make_plan(bundle, clone), clone)
    assert len(counted_looks(clone.ledger.runs_dir)) == 2
    said = "this bundle was looked at 1 time before: one answer of several"  # who asks until it holds is seen
    assert (said in again.notes, said in found.notes) == (True, False)


def test_an_interrupted_one_goes_on_with_the_same_seeds(kept: Setup, clone: Setup) -> None:
    certify(kept, num_seeds=1)
    bundle = read_bundle(bundled(kept))

    def interrupt(text: str) -> None:
        if "run 2 of 2" in text:
            raise Interrupted("stopped by SIGINT")

    assert isinstance(clone.reporter, SilentReporter)
    clone.reporter.on_note = interrupt
    with pytest.raises(Interrupted):
        reproduce(make_plan(bundle, clone), clone)
    [before] = clone.ledger.runs_dir.glob("certify/*/*/run.json")
    then = before.stat().st_mtime_ns
    clone.reporter.on_note = lambda text: None
    with pytest.raises(UsageError, match="began with 1 seeds and is not finished"):
        make_plan(bundle, clone, 3)
    reproduce(make_plan(bundle, clone), clone)
    assert before.stat().st_mtime_ns == then
    assert len(list(clone.ledger.runs_dir.glob("certify/*/*/run.json"))) == 2
    assert len(counted_looks(clone.ledger.runs_dir)) == 1
    assert living_children() == []


def test_other_code_rules_or_commits_are_refused_with_the_fix(
    kept: Setup, clone: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = read_bundle(bundled(kept))
    commit = bundle.manifest.commit
    (clone.root / "prepare.py").write_text("MEASURES = 'better'\n")
    with pytest.raises(UsageError, match=rf"prepare\.py differ from commit .*git switch --detach {commit}"):
        make_plan(bundle, clone)
    git(clone.root, "checkout", "--quiet", "prepare.py")
    with pytest.raises(UsageError, match=r"the rules here are arithmetic-trl other, .*Reproduce it on a machine as"):
        make_plan(bundle, replace(clone, rules_hash="other"))
    (clone.root / "rules.toml").write_text('environments = ["arithmetic"]\n')
    moved = replace(bundle, path=Path("/tmp/it; rm -r x.tar.gz"))
    with pytest.raises(UsageError, match=r"keep a copy: tar xzf '/tmp/it; rm -r x\.tar\.gz' -O rules\.toml$"):
        make_plan(moved, replace(clone, rules_hash="other"))
    told = msgspec.structs.replace(bundle.manifest, redacted=("rules.toml",))
    with pytest.raises(UsageError, match=rf"keep a copy: git show {commit}:rules\.toml$"):
        make_plan(replace(bundle, manifest=told), replace(clone, rules_hash="other"))
    unknown = replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, commit="1" * 40))
    with pytest.raises(UsageError, match=r"has no commit 111111111111, .*git fetch, then git switch --detach"):
        make_plan(unknown, clone)
    assert list(Ledger(clone.root).runs_dir.glob("reproduce/*")) == []


def claimed(bundle: Bundle, difference: float, half: float) -> Bundle:
    claim = Claim(source="believed", difference=difference, interval=(difference - half, difference + half))
    return replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, claim=claim))


def test_what_lies_inside_and_what_holds(kept: Setup) -> None:
    bundle, made = read_bundle(bundled(kept)), certify(kept, 1)
    for here, own, difference, half, inside, answer in (
        (0.10, 0.05, 0.10, 0.01, True, "holds"),
        (0.10, 0.05, 0.13, 0.04, True, "holds"),
        (0.10, 0.05, 0.13, 0.02, False, "holds"),  # outside, by no more than the noise of both
        (0.10, 0.05, 0.30, 0.05, False, "does not hold"),
        (0.10, 0.05, -0.10, 0.05, False, "does not hold"),
        (0.10, 0.05, 0.60, 0.60, True, "holds"),
        (0.0, 0.08, 0.085, 0.045, False, "open"),  # a weak one confirms nothing
        (0.05, 0.08, 0.085, 0.045, True, "open"),
        (-0.05, 0.04, 0.30, 0.60, True, "does not hold"),  # a loss, whatever is claimed
    ):
        found = judged(
            replace(made, difference=here, interval=(here - own, here + own)), claimed(bundle, difference, half)
        )
        assert (found.is_inside, found.answer) == (inside, answer), (here, difference)
        assert ("More --seeds" in summary(found)) == (answer == "open")


@pytest.mark.parametrize(("answer", "code"), [("holds", 0), ("does not hold", 3), ("open", 4)])
def test_the_command_exits_by_what_holds_and_says_json_alone(
    kept: Setup, answer: Answer, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = bundled(kept), []
    found = replace(judged(certify(kept, 1), read_bundle(path)), answer=answer)

    def compare(request: Request, plan: object, run: object, dry_run: bool) -> tuple[list[str], Reproduction]:
        asked.append(request)
        return [], found

    monkeypatch.setattr(command, "compare", compare)
    done = CliRunner().invoke(commands, ["reproduce", str(path), "--json"])
    assert done.exit_code == code
    said = json.loads(done.stdout)
    assert (said["kind"], said["version"], said["answer"]) == ("reproduce", 1, answer)
    assert (asked[0].engine, asked[0].budget_seconds) == ("trl", 1.0)
    path.write_bytes(b"no bundle")
    done = CliRunner().invoke(commands, ["reproduce", str(path), "--json"])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
