"""The words of page and report.md: the headline, numbers with their units, hostile text made visible."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import Any

from markupsafe import Markup

from nightshift.agents.history import KeyHistory
from nightshift.campaign.records import NO_DIFFERENCE, SIDES, Comparison, Effect, Stage, percent
from nightshift.campaign.results import contradiction, decisions_text, estimates, gain_text, last_scores, percents
from nightshift.report.data import Experiment, Morning
from nightshift.report.timing import Night
from nightshift.text import clean, counted

NOT_MEASURED, UNKNOWN = "not measured", "\N{EN DASH}"
_ARROW = "\N{RIGHTWARDS ARROW}"
_INCUMBENT = "the incumbent (the baseline with the kept changes) over the baseline"
# By verdict of the certificate: the title's first words, and the tone.
_CERTIFIED = {
    "better": ("Better", "good"),
    "worse": ("Worse", "bad"),
    NO_DIFFERENCE: ("No significant difference", "open"),
}
# Controls but for tab and newline, lone surrogates, and the characters that reorder or hide other text.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_MAX_TEXT = 4000  # characters of any one text
# Definitions below the headings of two tables.
KEPT_TERMS = (
    "P(it helps) is the probability that the effect is above 0. A change is kept at 60 %, reverted below 50 %, and "
    "confirmed above 95 %, which is rare in one night; until then it is unconfirmed. 'Kept later' means that later "
    "runs raised P to 60 %. Effects are estimated now, from all runs, ± half of their 95 % intervals. So an effect is "
    "not the difference of two measured scores."
)
RUN_TERMS = (
    "Effect and P(it helps) are those of the experiment's own change, as estimated at its decision. A re-run has no "
    "new change; the re-runs that end a night are its final check runs."
)
Step = tuple[str, str]  # a sentence and its command


@dataclass(frozen=True, slots=True)
class Headline:
    """The result in short (`title`) and with its numbers (`sentence`). `tone`: good, open, none or bad."""

    title: str
    sentence: str
    tone: str


@dataclass(frozen=True, slots=True)
class View:
    """The content of page, report.md and picture."""

    morning: Morning
    headline: Headline
    facts: tuple[tuple[str, str], ...]
    nothing_to_copy: str  # why; empty if there is something to copy
    copied: tuple[Step, ...]
    next_steps: tuple[Step, ...]
    keys: tuple[KeyHistory, ...]
    nights: tuple[Night, ...]
    notebook: str
    data: dict[str, Any]  # for the page's script
    written: datetime

    @property
    def results(self) -> str:
        """The numbers of experiments by verdict and of changes by `now`, and the time."""
        seconds = sum(night.length_seconds for night in self.nights)
        return f"{self.morning.counts}. Time without certificates: {duration(seconds) if seconds else NOT_MEASURED}."

    @property
    def train_toml(self) -> str:
        """The incumbent's train.toml; empty if there is nothing to copy, or the baseline's cannot be read."""
        configs = self.morning.configs
        return configs[1].source.decode(errors="replace") if configs and not self.nothing_to_copy else ""


def headline(morning: Morning) -> Headline:
    """Say whether the incumbent is better and by how much. The best raw score is never the answer: it is too high."""
    num, verdicts, standing = len(morning.experiments), morning.counts.verdict, morning.standing
    if num == 0:
        return Headline("Nothing has been run yet", "The first experiment of a campaign measures its baseline.", "none")
    if standing is None:
        if verdicts.get("crash", 0) + verdicts.get("interrupted", 0) == num:
            return Headline("Nothing has been measured", f"{morning.counts}.", "bad")
        return Headline("Nothing has been measured yet", "No experiment has its verdict yet.", "none")
    first = morning.story.campaign.baseline  # crashes may have come before it
    later = [e for e in morning.experiments if first and e.number > first.number and e.record.decided]
    if not later:
        words = "Only the baseline has been measured; there is nothing to compare it with."
        return Headline(f"Baseline: {score(standing.baseline)}", words, "none")
    gain, remarks = gain_text(standing), "".join(_remarks(morning))
    if not morning.kept:
        words = f"{counted(len(later))} after the baseline, none kept{' now' if morning.left else ''}. "
        words += f"The estimated score of the baseline is {score(standing.baseline)}.{remarks}"
        return Headline("No gain so far", words, "open")
    certificate = morning.certificate if morning.is_certified else None
    if certificate:  # the certified gain comes first: the title never claims more
        difference, interval = points(certificate.estimate.difference), _span(certificate.estimate.interval)
        low, high = certificate.estimate.interval
        agreement = "agrees with the certificate"
        if low > standing.gain + standing.gain_halfwidth or standing.gain - standing.gain_halfwidth > high:
            word = "higher" if standing.gain > high else "lower"
            agreement = f"is {word}: the certificate counts, because its seeds and its examples are fresh"
        words = f"Certified gain of {_INCUMBENT}: {difference} (95 % interval {interval}). "
        words += f"The campaign's own estimate is {gain} ({estimates(standing)}), which {agreement}.{remarks}"
        title, tone = _CERTIFIED.get(certificate.verdict, (certificate.verdict, "open"))
        crashes = f" ({certificate.crashes})" if certificate.crashes else ""
        return Headline(f"{title}, certified: {difference}{crashes}", words, tone)
    words = f"Estimated gain of {_INCUMBENT}, not certified: {gain} ({estimates(standing)}).{remarks}"
    if standing.gain > standing.gain_halfwidth:
        return Headline(f"Better: {gain}", words, "good")
    if standing.gain > 0:
        return Headline(f"Perhaps better: {gain}", f"{words} The interval includes no gain at all.", "open")
    return Headline("No gain so far", words, "open")


def _remarks(morning: Morning) -> Iterator[str]:
    """Yield what the final check runs scored, and whether they contradict the estimate."""
    records = (e.record for e in reversed(morning.experiments))
    runs = [*takewhile(lambda record: record.run.stage is not Stage.SEARCH, records)][::-1]  # none if others followed
    if (standing := morning.standing) and runs:
        scores = f"Their measured scores: {last_scores(runs)}."
        if words := contradiction(standing):
            yield f" {words}. {scores}"
        else:
            stages = [run.run.stage for run in runs if run.score is not None]
            is_few = min(stages.count(Stage.LAST_BASELINES), stages.count(Stage.LAST_INCUMBENTS)) < 2
            words = "are too few to check the estimate" if is_few else "agree with the estimate within its error"
            why = " The estimate uses all runs, and is lowered because the best of many noisy scores is too high."
            yield f" The final check runs {words}. {scores}{why if morning.kept else ''}"


def certificate_line(morning: Morning) -> str:
    """Return what was measured on the test split of baseline and incumbent."""
    if (c := morning.certificate) is None:
        not_yet = "Not certified yet: nothing was measured on the test split (uv run nightshift certify)."
        return morning.obsolete or not_yet
    numbers = tuple(len(c.scores(side)) for side in SIDES)
    each = f"{counted(numbers[0], 'fresh seed')} for each config"
    seeds = each if numbers[0] == numbers[1] else f"{numbers[0]} and {numbers[1]} fresh seeds"
    line = (
        f"Certified on {counted(c.num_examples, 'test example')} with {seeds}: {_measured(c)}: {c.verdict}, at level "
        f"{c.level:.3g}. Use {c.access} of the test split by this campaign. {_runs(c)}"
    )
    return f"Not of this incumbent: {morning.obsolete}. {line}" if morning.obsolete else line


def elsewhere_lines(morning: Morning) -> list[str]:
    """Return a line for each comparison on another environment, or with another budget."""
    return [
        f"Elsewhere: {'+'.join(c.environments)}, {c.budget_seconds:g} s of training, {c.model}: {c.verdict}, "
        f"{c.plan.names['incumbent']} against {c.plan.names['baseline']}: {_measured(c)}. {_runs(c)}"
        + "".join(f" {sentence(note)}" for note in c.notes)
        for c in morning.elsewhere
    ]


def sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:].rstrip('.')}."


def _measured(c: Comparison) -> str:
    """Return `50.0 % -> 60.0 %, +10.0 pp, 95 % interval +4.0 to +16.0 pp`, and the scores in the requested format and
    by environment."""
    arrow = f" {_ARROW} "
    scores, strict_scores = (arrow.join(map(score, pair)) for pair in (map(c.score, SIDES), c.strict_scores or ()))
    strict = f"; in the requested format {strict_scores}" if strict_scores not in ("", scores) else ""
    items = c.by_environment.items()
    parts = "".join(f"; {name} alone {points(e.difference)}, {_span(e.interval)}" for name, e in items)
    return f"{scores}, {points(c.estimate.difference)}, 95 % interval {_span(c.estimate.interval)}{strict}{parts}"


def _runs(c: Comparison) -> str:
    """Return the score and the steps of each run, and how many collapsed or crashed."""
    return " ".join(f"{part}." for part in (f"Scores in %: {c.runs_text}", c.collapses, c.crashes) if part)


def gain_parts(morning: Morning) -> str:
    """Return whether the effects of the kept changes add up to more or less than the gain, and why; and which changes
    undo each other. "" if both are equal to the shown digits."""
    standing, posterior = morning.standing, morning.story.campaign.posterior
    if standing is None or posterior is None or not morning.kept:
        return ""
    effects = sum(kept.effect.mean for kept in morning.kept)
    model_gain = posterior.predict(posterior.kept)[0] - posterior.predict(())[0]
    excess, shared = effects - standing.gain, effects - model_gain
    causes = []
    if excess > 0 and model_gain > standing.gain:
        causes.append("it is lowered, because the best of many noisy scores is too high")
    if shared * excess > 1e-9:
        causes.append("an effect is what the change adds to the others, and some of them set the same keys")
    if standing.contradicted:
        causes = ["it is the plain difference of the final check runs"]
    side = "less" if excess > 0 else "more"
    sentences = [f"The total is {side} than the effects together ({points(effects)}): {', and '.join(causes)}."]
    sentences = sentences if abs(excess) >= 0.0005 else []
    sentences += [
        f"{kept.change.name} only takes back {kept.takes_back}: together they change nothing, but effects and total "
        f"still count {kept.change.name}."
        for kept in morning.kept
        if kept.takes_back
    ]
    return " ".join(sentences)


def remark(e: Experiment) -> str:
    """Return why an experiment crashed, or what its run did besides its new change: `also re-testing 0007; 0003
    reverted`, and the guard that forbids the change."""
    if e.verdict == "crash":
        return clean(e.record.why, 160)
    guards = [part for part in e.record.why.split("; ") if " not kept: guard " in part]
    return "; ".join(filter(None, (e.record.run.with_rider.strip(" ()"), decisions_text(e.record.moved), *guards)))


def score(value: float | None, none: str = NOT_MEASURED) -> str:
    return none if value is None else percents(value)


def points(value: float) -> str:
    return f"{round(100 * value, 1) + 0.0:+.1f} pp"


def _span(interval: tuple[float, float]) -> str:
    return f"{points(interval[0]).removesuffix(' pp')} to {points(interval[1])}"


def plus_minus(value: Effect | None) -> str:
    """Return `+2.4 ± 4.9`; a dash for None."""
    return str(value).removesuffix(" pp") if value else UNKNOWN


def share(value: float | None) -> str:
    return UNKNOWN if value is None else percent(value)


def duration(seconds: float) -> str:
    """Return seconds below two minutes, minutes below two hours, else hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def visible(value: Any, limit: int = _MAX_TEXT) -> Any:
    """Return text, also in lists and mappings, so that it cannot hide, reorder or flood anything. Markup is ours."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return _HIDDEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", cut(value, limit))
    if isinstance(value, dict):
        return {visible(key): visible(each, limit) for key, each in value.items()}
    return [visible(each, limit) for each in value] if isinstance(value, list | tuple) else value


def cut(text: str, limit: int) -> str:
    """Return at most `limit` characters, and the number of characters that were left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} ... ({counted(len(text) - limit, 'more character')})"
