"""`nightshift transfer`: is what was found here better elsewhere too, or with more time?

Baseline and incumbent are trained afresh on another environment, or on the campaign's own with another budget, and
compared on its selection set: no sealed example is read, so it may be asked again. Gains of two scales have no ratio;
both stand with their intervals. Of several questions asked at once, Holm's procedure (Scandinavian Journal of
Statistics 6, 1979) keeps the chance of one false answer at 5 %.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace

from nightshift.baseline import require_packaged
from nightshift.campaign.ledger import Ledger
from nightshift.certify.certificate import LEVEL, Comparison, block, lines, t_probability
from nightshift.certify.pairs import DEFAULT_SEEDS, MAX_SEEDS, Pairs, compare, contenders, done
from nightshift.engines import open_engine
from nightshift.engines.downloads import data_problem
from nightshift.engines.memory import on_cards
from nightshift.errors import ConfigError, UsageError
from nightshift.experiment import require_ready
from nightshift.files import read_json, write_json
from nightshift.processes.gpus import num_gpus
from nightshift.rules_toml import rules_elsewhere
from nightshift.setup import Setup

FOLDER, TRANSFER_NAME = "transfer", "transfer.json"
FIRST_SEED_INDEX = 10_000_000  # above every certificate's
_CHOSEN_HERE = "scored on the selection set, on which the incumbent was chosen, and which may flatter it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer(Comparison):
    """What `runs/transfer/NAME/transfer.json` says. `here` is the campaign's belief about the same two configs, and
    `here_interval` its 95 %. `unused_keys` of the incumbent's change nothing there."""

    verdict: str  # by Holm's procedure among the questions of one command
    to: str  # the environments, joined by +
    budget_seconds: float
    model: str
    model_here: str
    incumbent: int
    here: float
    here_interval: tuple[float, float]
    unused_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """One question: the set-up there, and the runs that answer it."""

    setup: Setup
    pairs: Pairs
    incumbent: int
    unused_keys: tuple[str, ...]


def targets(setup: Setup, to: Sequence[str], budget_seconds: float | None, num_seeds: int | None) -> list[Target]:
    """What is to be asked; nothing is run. `to`: environments, several joined by +; none: the campaign's own.

    UsageError where nothing was kept, an environment is unknown, its data is missing, or a config is invalid there.
    """
    if not to and budget_seconds is None:
        raise UsageError("nothing differs from the campaign", "Give --to ENVIRONMENT, or --budget-seconds, or both.")
    sides = contenders(setup)
    found = []
    for names in dict.fromkeys(to or ["+".join(setup.rules.environment_names)]):
        rules = rules_elsewhere(setup.root, setup.rules, names.split("+"), num_gpus(os.environ))
        rules = rules.with_budget(rules.budget_seconds if budget_seconds is None else budget_seconds)
        rules = on_cards(rules, setup.root, os.environ, setup.request.gpus)
        if rules == setup.rules:
            raise UsageError(f"--to {names} is the campaign itself", "Give another environment, or --budget-seconds.")
        request, engine = setup.request, open_engine(rules, setup.root, dict(os.environ), setup.request.gpus)
        if problem := data_problem(setup.root, rules):
            raise UsageError(f"--to {names}: {problem.cause}", problem.fix)
        there = replace(
            setup,
            rules=rules,
            rules_hash=rules.hash(setup.root),
            harness_tree=rules.harness_tree(setup.root),
            engine=engine,
            request=replace(request, budget_seconds=budget_seconds),
        )
        try:
            validated = {side: engine.validate(setup.ledger.stored_config(r)) for side, r in sides.items()}
        except ConfigError as error:
            cause = f"--to {names}: a config of the campaign is invalid there: {error.cause}"
            raise UsageError(cause, error.fix) from None
        incumbent = sides["incumbent"].number
        name = f"{incumbent:04d}-{names}-{rules.budget_seconds:g}-{there.rules_hash}"
        settings = {side: one.settings for side, one in validated.items()}
        first = FIRST_SEED_INDEX + 2 * MAX_SEEDS * incumbent
        pairs = Pairs(setup.ledger.runs_dir / FOLDER / name, settings, num_seeds or DEFAULT_SEEDS, first)
        found.append(Target(there, pairs, incumbent, validated["incumbent"].unused))
    return found


def describe(questions: Sequence[Target], setup: Setup) -> list[str]:
    """The plan for people."""
    said = []
    for target in questions:
        rules, pairs = target.setup.rules, target.pairs
        there = f"{'+'.join(rules.environment_names)} with {rules.budget_text} of training"
        if rules.model != setup.rules.model:
            there += f" and {rules.model} instead of {setup.rules.model}"
        made = len(done(pairs, setup))
        said += [
            f"transfer: experiment {target.incumbent:04d} (incumbent) against the baseline on {there}, "
            f"{pairs.num_seeds} new seeds each",
            f"time:     at least {2 * pairs.num_seeds * rules.budget_seconds / 60:.0f} min"
            + (f", {made} of {2 * pairs.num_seeds} runs are done" if made else ""),
        ]
    return said


def transfer(questions: Sequence[Target], setup: Setup) -> list[Transfer]:
    """Answer them, one after the other; goes on where an interrupted one stopped. Call as the head.

    Raises as `certify` does.
    """
    standing = setup.campaign(setup.repo.head().branch).standing
    assert standing is not None  # something was kept
    for line in describe(questions, setup):
        setup.reporter.note(line)
    require_packaged(setup)
    found = []
    for target in questions:
        target.setup.engine.prepare_at_start(setup.reporter.note)
        require_ready(target.setup)
        target.pairs.folder.mkdir(parents=True, exist_ok=True)
        made = compare(target.pairs, target.setup)
        is_here = {*target.setup.rules.environment_names} & {*setup.rules.environment_names}
        found.append(replace(made, notes=(*made.notes, *([_CHOSEN_HERE] if is_here else []))))
    answers = []
    for target, comparison, verdict in zip(questions, found, verdicts(found), strict=True):
        rules = target.setup.rules
        answer = Transfer(
            **{field.name: getattr(comparison, field.name) for field in fields(comparison)},
            verdict=verdict,
            to="+".join(rules.environment_names),
            budget_seconds=rules.budget_seconds,
            model=rules.model,
            model_here=setup.rules.model,
            incumbent=target.incumbent,
            here=standing.difference,
            here_interval=standing.difference_interval,
            unused_keys=target.unused_keys,
        )
        with setup.ledger.lock():
            write_json(target.pairs.folder / TRANSFER_NAME, answer)
            setup.ledger.enter(target.pairs.folder / TRANSFER_NAME)
        answers.append(answer)
    return answers


def verdicts(answers: Sequence[Comparison]) -> list[str]:
    """`transfers`, `does not` (it is worse there) or `not told apart`, of answers to questions asked together."""
    chances = [t_probability(a.difference / a.stderr, a.df) if a.stderr and a.df else 1.0 for a in answers]
    found, is_open = ["not told apart"] * len(answers), True
    for rank, index in enumerate(sorted(range(len(answers)), key=chances.__getitem__)):
        is_open = is_open and chances[index] <= (1 - LEVEL) / (len(answers) - rank)
        if is_open:
            found[index] = "transfers" if answers[index].difference > 0 else "does not"
    return found


def summary(answers: Sequence[Transfer]) -> str:
    """A block for each, as certify prints one."""
    blocks = []
    for answer in answers:
        low, high = answer.here_interval
        models = f"{answer.model} there, {answer.model_here} here: two models"
        extra = [
            ("to", f"{answer.to}, {answer.budget_seconds:g} s of training"),
            ("here", f"{answer.here:+.6f} (interval_95 {low:+.6f} {high:+.6f}, the campaign's belief)"),
            *([("models", models)] if answer.model != answer.model_here else []),
            ("unused_keys", ", ".join(answer.unused_keys)),
            *(("note", note) for note in answer.notes),
        ]
        blocks.append(block([*lines(answer, answer.verdict), *extra]))
    return "\n".join(blocks)


def made(ledger: Ledger) -> list[Transfer]:
    """All answers that `transfer` entered into the chain, the latest last."""
    found = []
    for path in sorted(ledger.runs_dir.glob(f"{FOLDER}/*/{TRANSFER_NAME}")):
        with suppress(UsageError, OSError):  # who planted it will not see it shown
            if ledger.holds(path):
                found.append(read_json(path, Transfer, ""))
    return sorted((answer for answer in found if answer), key=lambda answer: answer.created)
