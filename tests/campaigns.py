"""Recorded campaigns, made up: single records, campaigns judged by the real rule, and one in a real ledger."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from msgspec import structs

from nightshift.agents.base import Context
from nightshift.campaign.campaign import Campaign, events_of
from nightshift.campaign.commits import change_keys, incumbent_config
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import (
    CERTIFY_NAME,
    COMPARISON_NAME,
    Change,
    ComparedRun,
    Comparison,
    Estimate,
    Evaluation,
    Judgement,
    Outcome,
    Plan,
    Proposal,
    Record,
    Result,
    Run,
    Training,
    Verdict,
    Weights,
    packed,
)
from nightshift.config.allowlist import ROWS
from nightshift.config.rules import RuleConstants
from nightshift.config.train_toml import Config, diff, parse, set_values, spelled
from nightshift.errors import Failure
from nightshift.files import write_json
from tests.rules import ARITHMETIC_TRL

BRANCH = "autoresearch/test"
BASELINE = b"[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = 6e-7  # poor\n"
KEYS = (
    ("trainer.optim.weight_decay", 0.001),
    ("trainer.optim.max_norm", 0.01),
    ("orchestrator.train.sampling.temperature", 0.01),
    ("trainer.optim.lr", 1e-7),
)
SCORES = {"3e-6": 0.60, "6e-7": 0.35}  # of every other rate 0.55


def a_result(score: float = 0.5, num_examples: int = 2, seed: int = 1001) -> Result:
    """An evaluated run: the first examples are right, as many as `score` says."""
    right = round(score * num_examples)
    scores = (1.0,) * right + (0.0,) * (num_examples - right)
    stderr = math.sqrt(right * (num_examples - right) / num_examples**3)
    evaluation = Evaluation(score, stderr, packed(scores), "e" * 64, 0.0, 12.5, Weights(40, "f" * 64), 3.0)
    training = Training(Outcome.BUDGET, num_steps=40, training_seconds=60.1, reward_mean=0.4, peak_memory_gb=0.9)
    return Result(seed, training, evaluation, startup_seconds=9.0, total_seconds=75.0)


T = TypeVar("T")


def replace(value: T, **changes: Any) -> T:
    """As `dataclasses.replace`, for Structs too; a record takes the fields of its proposal."""
    if dataclasses.is_dataclass(value):
        return cast(T, dataclasses.replace(cast(Any, value), **changes))
    if isinstance(value, Record):
        said = {name: changes.pop(name) for name in Proposal.__struct_fields__ if name in changes}
        changes = {"proposal": structs.replace(value.proposal, **said)} | changes
    return cast(T, structs.replace(cast(Any, value), **changes))


def a_record(**changes: object) -> Record:
    """A record as it is reserved, with `changes`."""
    record = Record(
        number=0,
        status="started",
        branch=BRANCH,
        parent=None,
        proposal=Proposal(description="lr 3e-6 -> 5e-6"),
        started="2026-11-20T19:00:00+00:00",
        engine="trl",
        rules_name=ARITHMETIC_TRL.name,
        rules_hash="abc123",
        config_hash="c0ffee",
        diff=("trainer.optim.lr 3e-6 -> 5e-6",),
        unused_keys=(),
        commit="0" * 40,
        versions={"python": "3.11"},
        hardware="cpu",
        decision_rules=ARITHMETIC_TRL.decision,
    )
    return replace(record, **changes)


def a_change(number: int) -> Change:
    """A change that experiment `number` proposes: of neighbours each has a key of its own."""
    key, scale = KEYS[number % len(KEYS)]
    return Change(experiment=number, keys={key: spelled(float(f"{scale * number:g}"))})


def judged(
    story: Sequence[float | None], rules: RuleConstants = ARITHMETIC_TRL.decision, num_examples: int = 400
) -> list[Record]:
    """A campaign as experiment.py decides it, from the score of each experiment; the first is the baseline.

    An experiment without a score is a crash.
    """
    records, baseline = list[Record](), parse(BASELINE)
    for number, score in enumerate(story, 1):
        result = None if score is None else a_result(score, num_examples, 1000 + number)
        campaign = folded(records)
        parent = campaign.parent.number if campaign.parent else None
        change = a_change(number)
        ((key, value),) = change.keys.items()
        record = a_record(
            number=number,
            decided=number,
            decided_before=number - 1,
            parent=parent,
            run=Run() if parent is None else Run(kept=campaign.kept, new=change),
            diff=() if parent is None else (f"+{key} {value}",),
            config_hash=baseline.hash if parent is None else f"{number}",
            decision_rules=rules,
            result=result,
        )
        crash = replace(record, status=Verdict.CRASH, judgement=Judgement(why="loss is nan"))
        records.append(campaign.judge(record, baseline) if result else crash)
    return records


def folded(records: Sequence[Record]) -> Campaign:
    return Campaign.of(records, BRANCH, a_record().rules_hash)


def stored(root: Path, records: Sequence[Record]) -> Ledger:
    """A ledger in `root` with closed records, numbered in their order."""
    ledger = Ledger(root)
    for record in records:
        number = ledger.reserve(record, BASELINE).number
        ledger.close(replace(record, number=number))
    return ledger


def tell(
    ledger: Ledger,
    changes: dict[str, Any],
    score: float | None,
    rider: Change | None = None,
    source: bytes = BASELINE,
    branch: str = BRANCH,
    **fields: object,
) -> Record:
    """Add an experiment to a ledger, decided by the rule from 1,000 examples: `changes` of the incumbent's train.toml,
    and a rider. The first one is the baseline, `source` with its changes; one without a score is a crash."""
    before = Campaign.of(ledger.records(), branch, "rules")
    number = ledger.next_number()
    baseline = ledger.stored_config(before.baseline) if before.baseline else parse(set_values(source, changes))
    incumbent = incumbent_config(baseline, before.kept)
    keys = change_keys(incumbent, parse(set_values(incumbent.source, changes)))
    run = Run(kept=before.kept, rider=rider, new=before.known(keys) if keys else None)
    candidate = incumbent_config(baseline, run.changes)
    record = a_record(
        branch=branch,
        number=number,
        decided_before=number - 1,
        parent=before.parent.number if before.parent else None,
        run=run,
        diff=tuple(
            change.line for change in diff(incumbent_config(baseline, replace(run, new=None).changes), candidate)
        ),
        started="2026-11-21T22:00:00+00:00",
        rules_hash="rules",
        config_hash=candidate.hash,
        result=replace(a_result(score or 0.0, 1000, 1000 + number), **({"evaluation": None} if score is None else {})),
        git_action="git_action",
    )
    record = ledger.reserve(replace(record, **fields), candidate.source)
    record = replace(record, decided=number)
    if score is None:
        failed = {"status": Verdict.CRASH, "failure": Failure.CONFIG, "judgement": Judgement(why="loss is nan")}
        ledger.close(replace(record, **failed))
    else:
        ledger.close(before.judge(record, baseline))
    return ledger.record(number)


def campaign(ledger: Ledger, rates: list[str], branch: str = BRANCH) -> list[Record]:
    """Experiments that change the learning rate, in a ledger: a baseline at 6e-7, then one experiment a rate. 3e-6 is
    much better than all others."""
    for rate in ["6e-7", *rates]:
        number, is_first = ledger.next_number(), not ledger.records()
        tell(
            ledger,
            {"trainer.optim.lr": float(rate)},
            SCORES.get(rate, 0.55),
            branch=branch,
            description="baseline" if is_first else f"idea {number}",
            lesson=None if is_first else f"lesson {number}",
            health=f"entropy fell {number}",
        )
    return ledger.records()


def context_of(root: Path, rates: list[str], **changes: object) -> Context:
    """What a proposer is given after `campaign`."""
    ledger = Ledger(root)
    campaign(ledger, rates)
    return context_after(ledger, **changes)


def context_after(ledger: Ledger, **changes: object) -> Context:
    """What a proposer is given after the experiments of a ledger."""
    told = Campaign.of(ledger.records(), BRANCH, "rules")
    assert told.baseline is not None
    source = incumbent_config(ledger.stored_config(told.baseline), told.kept).source
    context = Context(ledger.next_number(), source, told, ARITHMETIC_TRL, ledger, ROWS)
    return replace(context, **changes)


COMPARISON = Comparison(
    plan=Plan(
        number=1,
        branch=BRANCH,
        rules_hash="abc123",
        split="test",
        configs={"baseline": "b", "incumbent": "i"},
        names={"baseline": "experiment 0001", "incumbent": "experiment 0005"},
        num_seeds=3,
        first_seed_index=100_000,
    ),
    created="2026-11-21T08:00:00+00:00",
    verdict="better",
    level=0.025,
    access=1,
    estimate=Estimate(0.05, 0.015, 30.0, (0.02, 0.08)),
    runs=tuple(
        ComparedRun(side, 101_000 + i, 300 + i, score)
        for side, score in (("baseline", 0.66), ("incumbent", 0.71))
        for i in range(3)
    ),
    num_examples=1000,
    strict_scores=None,
    by_environment={},
    notes=(),
)


def with_certificate(ledger: Ledger, comparison: Comparison) -> None:
    """Write a comparison as `nightshift certify` does, without its runs."""
    path = ledger.runs_dir / CERTIFY_NAME / "0001" / COMPARISON_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, comparison)


def certificate_for(ledger: Ledger, plan: dict[str, Any] | None = None, **changes: Any) -> Comparison:
    """A certificate of the campaign's baseline and incumbent; `plan`: what is changed of its plan."""
    records = ledger.records()
    campaign = Campaign.of(records, records[0].branch, records[0].rules_hash)
    assert campaign.baseline is not None
    baseline = ledger.stored_config(campaign.baseline)
    configs = {"baseline": baseline.hash, "incumbent": incumbent_config(baseline, campaign.kept).hash}
    told = {"branch": records[0].branch, "rules_hash": records[0].rules_hash, "configs": configs} | (plan or {})
    return replace(COMPARISON, plan=replace(COMPARISON.plan, **told), **changes)


def contradictions(records: Sequence[Record], stored: Callable[[Record], Config]) -> list[int]:
    """Return the experiments whose decisions are not those that the rule makes of its scores. `stored` returns the
    config that an experiment ran."""
    numbers = []
    for branch, rules_hash in dict.fromkeys((record.branch, record.rules_hash) for record in records):
        campaign = Campaign()
        for is_start, record in events_of(records, branch, rules_hash):
            judged = record.judgement
            if not is_start and judged and record.status != Verdict.CRASH and campaign.baseline:
                again = campaign.judge(record, stored(campaign.baseline)).judgement
                # What the engine refused cannot be repeated without the engine.
                if _decided(again) != _decided(judged) and not judged.refused:
                    numbers.append(record.number)
            campaign.step(is_start, record)
    return numbers


def _decided(judgement: Judgement | None) -> list[tuple[str, str, float]]:
    decisions = judgement.decisions if judgement else ()
    return [(d.change.name, d.action, round(d.effect or 0.0, 9)) for d in decisions]
