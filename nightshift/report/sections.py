"""The sections that page and report.md share, among them what to do next, which a night prints, too."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from nightshift.agents.history import KEYS_TITLE, key_histories
from nightshift.agents.notebook import notebook
from nightshift.campaign.campaign import Campaign, uncommitted
from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import Ledger, campaign_cost
from nightshift.campaign.records import NOT_ISOLATED, Change, percent
from nightshift.campaign.results import gain_text, one_baseline
from nightshift.campaign.waits import NightStatus
from nightshift.config.train_toml import UNSET, diff
from nightshift.errors import EngineError
from nightshift.report.data import Morning, Story, certificates
from nightshift.report.text import UNKNOWN, Headline, certificate_line, gain_parts, plus_minus, points
from nightshift.text import counted
from nightshift.waiting import lasted

# Definitions below the headings of two tables.
KEPT_TERMS = (
    "P(it helps) is the probability that the effect is above 0, rounded down. A change is kept at 60 %, reverted below "
    "50 %, and confirmed above 95 %, which is rare in one night if effects are small; until then it is unconfirmed. "
    "'Kept later' means that later runs raised P to 60 %. Effects are estimated now, from all runs, ± half of their "
    "95 % intervals: quote these for a change. (An interval excludes 0 only if P is above 97.5 %.) So an effect is not "
    "the difference of two measured scores. A row shows a change as it was tried, against the incumbent of its day; "
    "the net change is in the table above."
)
RUN_TERMS = (
    "Effect and P(it helps) are those of the experiment's own change, as estimated at its decision. A re-run has no "
    "new change; the re-runs that end a night are its final check runs."
)
CERTIFY = "uv run nightshift certify"
Step = tuple[str, str]  # a sentence and its command
Cell = str | Sequence[str]  # a text, or lines of code


@dataclass(frozen=True)
class Section:
    """A heading with sentences, commands, a table, `notes` below the table, and `source`, a text with its `name`."""

    title: str
    lines: Sequence[str] = ()
    steps: Sequence[Step] = ()
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()
    notes: Sequence[str] = ()
    name: str = ""
    source: str = ""


@dataclass(frozen=True)
class View:
    """The content of page, report.md and picture."""

    morning: Morning
    headline: Headline
    sections: Mapping[str, Section]
    data: dict[str, Any]  # for the page's script
    written: datetime


def sections(morning: Morning, seconds: Mapping[str, float]) -> dict[str, Section]:
    """Return the sections by their names, in the order of report.md. `seconds`: of all runs, by use."""
    if not morning.experiments:
        return {}
    story, whole = morning.story, sum(seconds.values())
    cost, missing = campaign_cost(story.ledger.runs_dir, story.records), uncommitted(story.records, story.branch)
    steps, night = next_steps(story.ledger, story.campaign, morning.night), morning.night
    times = [(use, lasted(value), f"{100 * value / whole:.0f} %") for use, value in seconds.items()]
    configs = story.campaign.configs
    keys = key_histories(story.campaign, story.configs, configs[1]) if configs else ()
    scores = "\n".join([KEYS_TITLE, *(line for key in keys for line in key.lines)]) if keys else ""
    notes = notebook(story.campaign).partition("\n")[2].strip()
    return {
        "facts": Section("", ["; ".join(_facts(story))]),
        "git": Section("Not in git", [missing] if missing else ()),
        "copy": _copy(morning),
        "next": Section("What next", steps=[*steps]),
        "kept": _kept(morning),
        "certificate": _certificate(morning),
        "keys": Section("Scores by key and value", name="each value of each key", source=scores),
        "time": Section("Compute used", [f"Without certificates: {cost}."], heads=("use", "time", "share"), rows=times),
        "night": Section(
            "The agent during the last night", night.morning(story.records, datetime.now(UTC)) if night else ()
        ),
        "notebook": Section("Notebook", name="hypotheses, outcomes and lessons, the latest first", source=notes),
        "notes": Section("What this page does not show", story.notes),
    }


def _facts(story: Story) -> list[str]:
    """Return task, model, budget, hardware and engine, and the agent's missing isolation."""
    last, rules = story.records[-1], next(filter(None, map(story.rules, reversed(story.records))), None)
    num_open = sum(not record.proposal.is_isolated for record in story.records)
    num_examples = rules and sum(environment.num_validation for environment in rules.environments)
    return [
        f"task: {' + '.join(last.environments)}",
        f"model: {rules.model if rules else 'not recorded'}",
        f"score: on {num_examples:,} validation examples" if num_examples else "score: number of examples not recorded",
        f"budget: {rules.budget_text if rules else 'not recorded'} of training a run",
        f"hardware: {last.hardware.replace(' side by side', ' runs at a time')}",
        f"engine: {last.engine}",
        *([f"agent: {NOT_ISOLATED} in {counted(num_open)} (--sandbox none)"] if num_open else ()),
    ]


def _copy(morning: Morning) -> Section:
    title, configs = "What to copy", morning.story.campaign.configs
    why = nothing_to_copy(morning) if configs else "The train.toml of the baseline cannot be read."
    if why or configs is None:
        return Section(title, [why])
    names = ", ".join(change.name for change, _ in doubtful(morning.story.campaign))
    lines = [f"Doubtful among the kept changes: {names}. 'What next' has the commands that take them out."]
    changes = [([change.key], change.old or UNSET, change.new or UNSET) for change in diff(*configs)]
    heads, source = ("net change", "baseline", "incumbent"), configs[1].source.decode(errors="replace")
    steps, name = [*copied(morning)], f"the incumbent's train.toml ({counted(len(source.splitlines()), 'line')})"
    last, notes = morning.story.campaign.incumbent_run, list[str]()
    if last is not None:
        notes = [f"The rules multiply a value: {line}. Other programs need the product." for line in last.scaled]
        unused = ", ".join(last.unused_keys)
        notes += [f"The engine {last.engine} does not use: {unused}."] if unused else []
    return Section(title, lines if names else (), steps, heads, changes, notes, name, source)


def _kept(morning: Morning) -> Section:
    title, campaign, by_number = "What was kept", morning.story.campaign, {e.number: e for e in morning.experiments}
    left = [f"{e.number:04d} {e.fate}" for e in morning.experiments if e.fate]
    notes = [f"Kept once, not any more: {'; '.join(left[-40:])}."] if left else []
    if not campaign.effects or morning.standing is None:
        return Section(title, ["Nothing."], notes=notes)
    rows = list[Sequence[Cell]]()
    for change, effect in campaign.effects:
        experiment = by_number.get(change.experiment)
        support = [percent(effect.p_helps), "confirmed" if campaign.is_confirmed(change) else "unconfirmed"]
        support += ["kept later"] if experiment and experiment.row.now == "kept later" else []
        tried = experiment.record.diff if experiment else [change.settings]
        commit = (experiment.row.commit if experiment else change.commit) or UNKNOWN
        rows.append((change.name, tried, plus_minus(effect), ", ".join(support), [commit[:7]]))
    how = "by the final check runs" if morning.standing.contradicted else "corrected for selection"
    total = gain_text(morning.standing).removesuffix(" pp")
    rows.append(("total", f"of the incumbent over the baseline, {how}", total, "", ""))
    heads = ("run", "change, as it was tried", "effect now, pp", "P(it helps)", "commit")
    return Section(title, [KEPT_TERMS], (), heads, rows, [*filter(None, [gain_parts(morning)]), *notes])


def _certificate(morning: Morning) -> Section:
    lines = [certificate_line(morning)]
    if c := morning.certificate:
        lines.append(
            f"Made {c.created}. The interval includes the variance between seeds and the variance of the paired "
            "difference between examples."
        )
        lines += [f"{note[:1].upper()}{note[1:].rstrip('.')}." for note in c.notes]
    return Section("Certificate", lines)


# -- what to copy, and what next ----------------------------------------------------------------------


def next_steps(ledger: Ledger, campaign: Campaign, night: NightStatus | None) -> Iterator[Step]:
    """Yield what you may do next, in this order. `night`: the last night of the campaign."""
    is_on = night is not None and night.is_on(ledger)
    if is_on:
        yield "A night is running on this branch. Its state:", "uv run nightshift status"
    elif night is not None and night.cause is None:
        yield "The night was cut off. To resume:", night.command
    if campaign.posterior is None:
        yield "Nothing is measured yet. Check this machine:", "uv run nightshift doctor"
        yield "Measure the baseline:", "uv run run.py"
        return
    if campaign.kept:
        yield "See what is kept, key by key:", "uv run nightshift diff baseline incumbent"
    limit = percent(campaign.posterior.rules.keep_at)
    for place, (change, p_helps) in enumerate(doubtful(campaign)):
        why = "" if place else f"A kept change is doubtful while P(it helps) is below {limit}. "
        command = f"git revert {change.commit[:7]}" if change.commit else f"uv run nightshift revert {change.name}"
        yield f"{why}To take out {change.name} ({percent(p_helps)}):", command
    certificate, unfinished = certificates(ledger, campaign)
    if campaign.rests_on_one_baseline and campaign.standing and not is_on and certificate is None:
        yield one_baseline(campaign.standing)
    if unfinished is not None and not is_on:
        yield f"Comparison {unfinished:04d} is unfinished. Finish it:", f"{CERTIFY} --resume {unfinished:04d}"
    elif campaign.kept and not is_on and certificate is None:
        yield "Certify the gain with fresh seeds on the test problems (later verdicts need stronger evidence):", CERTIFY
    if night is None or night.cause is not None:
        command = night.command if night else ""  # of the last night
        yield "Continue the search in a new night:", command or "uv run nightshift night --agent tpe --hours 8"
    if campaign.kept and campaign.incumbent_run:
        yield "Take the weights home:", "uv run nightshift export --to model"


def doubtful(campaign: Campaign) -> list[tuple[Change, float]]:
    """Return the kept changes whose P(it helps) is now below that of a keep, the most certain first."""
    assert campaign.posterior is not None
    keep_at = campaign.posterior.rules.keep_at
    return [(change, effect.p_helps) for change, effect in campaign.effects if effect.p_helps < keep_at]


def nothing_to_copy(morning: Morning) -> str:
    """Return why there is nothing to copy: without a gain the baseline's train.toml is as good. Empty if there is."""
    if morning.standing is None or not morning.story.campaign.kept:
        return "Nothing to copy: no change is kept."
    gain, text = morning.standing.gain, f"estimated gain is {gain_text(morning.standing)}"
    if certificate := morning.certificate:
        gain, text = certificate.estimate.difference, f"certified gain is {points(certificate.estimate.difference)}"
    return "" if gain > 0 else f"Nothing to copy: the {text}."


def copied(morning: Morning) -> Iterator[Step]:
    """Yield the commands that show the incumbent's changes to train.toml and bring them to the main branch."""
    baseline, branch, repo = morning.story.campaign.baseline, morning.story.branch, Repo(morning.story.ledger.root)
    if baseline is not None and baseline.commit and branch:
        tip = shlex.quote(branch)
        yield "The incumbent against the baseline:", f"git diff {baseline.commit[:10]} {tip} -- train.toml"
        with suppress(EngineError):  # there is no repository
            main = next((name for name in repo.branches() if name != branch and repo.is_default(name)), None)
            is_on = morning.night is not None and morning.night.is_on(morning.story.ledger)
            if main is not None and not is_on:
                command = f"git switch {shlex.quote(main)} && git merge --no-edit {tip}"
                yield "To bring the commits of this branch to your main branch:", command
