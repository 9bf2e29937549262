"""Recorded campaigns, made up: experiments that change the learning rate, written to a real ledger."""

from __future__ import annotations

from dataclasses import replace

from nightshift.campaign.ledger import Ledger
from nightshift.records import Evaluation, Judgement, Outcome, Record, Run, Side, Training, Verdict, Weights
from nightshift.train_toml.config import parse
from nightshift.train_toml.diff import diff
from nightshift.train_toml.edit import set_values

BASELINE = b"[orchestrator]\nbatch_size = 256\ngroup_size = 4\n[trainer.optim]\nlr = 6e-7  # poor\n"
SCORES = {"3e-6": 0.60, "6e-7": 0.35}  # of every other rate 0.55


def campaign(ledger: Ledger, rates: list[str], branch: str = "autoresearch/test") -> list[Record]:
    """A baseline at 6e-7, then one experiment a rate: the first 3e-6 is kept, the others are discarded."""
    records: list[Record] = []
    incumbent: Record | None = None
    for rate in ["6e-7", *rates]:
        source = set_values(BASELINE, {"trainer.optim.lr": float(rate)})
        records.append(_experiment(ledger, source, rate, incumbent, branch))
        if records[-1].status == "keep":
            incumbent = records[-1]
    return records


def _experiment(ledger: Ledger, source: bytes, rate: str, incumbent: Record | None, branch: str) -> Record:
    candidate = parse(source)
    old = parse(ledger.source(incumbent.number)) if incumbent else None
    before = SCORES["6e-7"] if incumbent is None or incumbent.parent is None else SCORES["3e-6"]
    score = SCORES.get(rate, 0.55)
    number = max(ledger.numbers(), default=0) + 1
    keep = incumbent is None or score > before
    judgement = Judgement(
        Verdict.KEEP if keep else Verdict.DISCARD,
        "baseline: 1 run" if incumbent is None else f"expected {100 * (score - before):+.1f} pp",
        delta=None if incumbent is None else score - before,
        delta_stderr=None if incumbent is None else 0.04,
        p_better=None if incumbent is None else 0.5,
        incumbent_score=score if incumbent is None else before,
    )
    scores = tuple(float(i < 100 * score) for i in range(100))
    evaluation = Evaluation(score, 0.05, scores, "examples", 0.0, 10.0, Weights(20, "0" * 64), 5.0)
    training = Training(Outcome.BUDGET, num_steps=20, training_seconds=60.0, reward_mean=score)
    record = Record(
        number=0,
        status="started",
        branch=branch,
        parent=incumbent.number if incumbent else None,
        description="baseline" if incumbent is None else f"idea {number}",
        started="2026-11-21T22:00:00+00:00",
        engine="trl",
        rules_name="arithmetic-trl",
        rules_hash="rules",
        config_hash=candidate.hash,
        effective_hash="effective",
        diff=tuple(change.line for change in diff(old, candidate)) if old else (),
        unused_keys=(),
        commit="0" * 40,
        versions={},
        hardware="cpu",
        runs=(Run(1, Side.CANDIDATE, 1000, training, evaluation, 5.0, 70.0),),
        judgement=judgement,
        settled="settled",
        health=f"entropy fell {number}",
        lesson=f"lesson {number}" if incumbent else None,
    )
    record = ledger.reserve(record, {"train.toml": source})
    record = replace(record, status=judgement.verdict)
    ledger.close(record)
    return record
