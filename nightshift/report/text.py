"""How the morning page says things: the verdict sentence, numbers with their units, hostile text made visible."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from markupsafe import Markup

from nightshift.agents.history import KeyHistory
from nightshift.campaign.campaign import compare
from nightshift.campaign.records import NO_DIFFERENCE, SIDES, Comparison, Effect, Stage, percent
from nightshift.campaign.results import contradiction, decisions_text, estimates, gain_text, last_scores, percents
from nightshift.report.data import Experiment, Morning
from nightshift.report.timing import Night
from nightshift.text import clean, counted

NOT_MEASURED, UNKNOWN = "not measured", "\N{EN DASH}"
_ARROW = "\N{RIGHTWARDS ARROW}"
# By verdict of the certificate: the title's first words, and the tone.
_CERTIFIED = {
    "better": ("Better", "good"),
    "worse": ("Worse", "bad"),
    NO_DIFFERENCE: ("No significant difference", "open"),
}
# Text that is not to be shown as it is: controls but for tab and newline, lone surrogates, and the
# characters that reorder or hide other text.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_MAX_TEXT = 4000  # characters of any one text


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict: `title` is its short form, `sentence` has the numbers, `tone` is good, open, none or bad."""

    title: str
    sentence: str
    tone: str


@dataclass(frozen=True, slots=True)
class View:
    """Everything that page, summary and picture are drawn from."""

    morning: Morning
    headline: Headline
    facts: tuple[tuple[str, str], ...]
    copied: tuple[tuple[str, str], ...]  # what to copy: a sentence and its command
    next_steps: tuple[tuple[str, str], ...]  # a sentence and its command
    keys: tuple[KeyHistory, ...]
    nights: tuple[Night, ...]
    notebook: str
    data: dict[str, Any]  # of the script
    written: datetime

    @property
    def results(self) -> str:
        """The experiments by verdict, their changes by what became of them, and the time."""
        seconds = sum(night.length_seconds for night in self.nights)
        return f"{self.morning.counts}. Time without certificates: {duration(seconds) if seconds else NOT_MEASURED}."

    @property
    def train_toml(self) -> str:
        """The incumbent's train.toml; empty if the baseline's cannot be read."""
        configs = self.morning.configs
        return configs[1].source.decode(errors="replace") if configs else ""


def headline(morning: Morning) -> Headline:
    """Did it get better, and by how much? The reported gain, not the best raw score: that one is too high."""
    num, verdicts, standing = len(morning.experiments), morning.counts.verdict, morning.standing
    if num == 0:
        return Headline("Nothing has been run yet", "The first experiment of a campaign measures its baseline.", "none")
    if standing is None:
        if verdicts.get("crash", 0) + verdicts.get("interrupted", 0) == num:
            return Headline("Nothing has been measured", f"{morning.counts}.", "bad")
        return Headline("Nothing has been measured yet", "No experiment has its verdict yet.", "none")
    baseline = morning.baseline.number if morning.baseline else 0  # crashes may have come before it
    later = [e for e in morning.experiments if e.number > baseline and e.record.decided]
    if not later:
        words = "Only the baseline has been measured; there is nothing to compare it with."
        return Headline(f"Baseline: {score(standing.baseline)}", words, "none")
    gain, remarks = gain_text(standing), "".join(_remarks(morning))
    if not morning.kept:
        words = f"{counted(len(later))} after the baseline, none kept{' now' if morning.left else ''}. "
        words += f"The estimated score of the baseline is {score(standing.baseline)}.{remarks}"
        return Headline("No gain so far", words, "open")
    certificate = None if morning.obsolete else morning.certificate
    if certificate:  # one gain comes first, the certified one: the title never claims more
        difference, interval = points(certificate.estimate.difference), _span(certificate.estimate.interval)
        low, high = certificate.estimate.interval
        agreement = "agrees with the certificate"
        if low > standing.gain + standing.gain_halfwidth or standing.gain - standing.gain_halfwidth > high:
            word = "higher" if standing.gain > high else "lower"
            agreement = f"is {word}: the certificate counts, because its seeds and its examples are fresh"
        words = f"Certified gain of the incumbent over the baseline: {difference} (95 % interval {interval}). "
        words += f"The campaign's own estimate is {gain} ({estimates(standing)}), which {agreement}.{remarks}"
        title, tone = _CERTIFIED.get(certificate.verdict, (certificate.verdict, "open"))
        crashes = f" ({certificate.crashes})" if certificate.crashes else ""
        return Headline(f"{title}, certified: {difference}{crashes}", words, tone)
    words = (
        f"Estimated gain of the incumbent over the baseline, not certified: {gain} ({estimates(standing)}).{remarks}"
    )
    if standing.gain > standing.gain_halfwidth:
        return Headline(f"Better: {gain}", words, "good")
    if standing.gain > 0:
        return Headline(f"Perhaps better: {gain}", f"{words} The interval includes no gain at all.", "open")
    return Headline("No gain so far", words, "open")


def _remarks(morning: Morning) -> Iterator[str]:
    """Yield what the final check runs scored, whether they contradict the estimate, and whether more than the answer
    format was learnt."""
    if (standing := morning.standing) and (runs := morning.final_runs):
        scores = f"Their measured scores: {last_scores(runs)}."
        if words := contradiction(standing):
            yield f" {words}. {scores}"
        else:
            stages = [run.run.stage for run in runs if run.score is not None]
            is_few = min(stages.count(Stage.LAST_BASELINES), stages.count(Stage.LAST_INCUMBENTS)) < 2
            words = "are too few to check the estimate" if is_few else "agree with the estimate within its error"
            why = "An estimate uses all runs, and is lowered because the best of many noisy scores is too high."
            yield f" The final check runs {words}. {scores} {why if morning.kept else ''}".rstrip()
    campaign = morning.story.campaign
    last = campaign.incumbent_run or campaign.parent
    form = compare(last, campaign.baseline) if last and morning.kept else None
    if form:
        strict = f"strict score {f' {_ARROW} '.join(map(score, form.strict_scores))}"
        yield f" Raw {strict}, score {points(form.gain)}: {form.conclusion}."


def certificate_line(morning: Morning) -> str:
    """One sentence: what the test split says of baseline and incumbent."""
    if (c := morning.certificate) is None:
        return (
            morning.obsolete or "Not certified yet: nothing was measured on the test split (uv run nightshift certify)."
        )
    seeds = tuple(len(c.scores(side)) for side in SIDES)
    told = "1 fresh seed each" if seeds == (1, 1) else f"{seeds[0]} and {seeds[1]} fresh seeds"
    line = (
        f"Certified on {counted(c.num_examples, 'test example')} with {told}: {_measured(c)}: {c.verdict}, at level "
        f"{c.level:.3g}. Use {c.access} of the test split by this campaign. {_runs(c)}"
    )
    return f"Not of this incumbent: {morning.obsolete}. {line}" if morning.obsolete else line


def elsewhere_lines(morning: Morning) -> list[str]:
    """A sentence for each comparison on another environment, or with another budget."""
    return [
        f"Elsewhere: {'+'.join(c.environments)}, {c.budget_seconds:g} s of training, {c.model}: {c.verdict}, "
        f"{c.plan.names['incumbent']} against {c.plan.names['baseline']}: {_measured(c)}. {_runs(c)}"
        + "".join(f" {sentence(note)}" for note in c.notes)
        for c in morning.elsewhere
    ]


def sentence(note: str) -> str:
    """Return a note as a sentence."""
    return f"{note[:1].upper()}{note[1:].rstrip('.')}."


def _measured(c: Comparison) -> str:
    """`50.0 % -> 60.0 %, +10.0 pp, 95 % interval +4.0 to +16.0 pp`, and what else was measured."""
    strict = f"; strict {score(c.strict_scores[0])} {_ARROW} {score(c.strict_scores[1])}" if c.strict_scores else ""
    each = c.by_environment.items()
    parts = "".join(f"; {name} alone {points(e.difference)}, {_span(e.interval)}" for name, e in each)
    change = f"{score(c.score('baseline'))} {_ARROW} {score(c.score('incumbent'))}, {points(c.estimate.difference)}"
    return f"{change}, 95 % interval {_span(c.estimate.interval)}{strict}{parts}"


def _runs(c: Comparison) -> str:
    """Return the score and the steps of each run, and how many collapsed or crashed."""
    return " ".join(f"{part}." for part in (f"Scores in %: {c.runs_text}", c.collapses, c.crashes) if part)


def remark(e: Experiment) -> str:
    """Return why an experiment crashed, or what its run did besides its new change: `also re-testing 0007; 0003
    reverted`, and the guard that forbids the change."""
    if e.is_crash:
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
    """Return `+2.4 ± 4.9`, for a column that names the unit; a dash where nothing is known."""
    return str(value).removesuffix(" pp") if value else UNKNOWN


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{percent(value)} %"


def duration(seconds: float) -> str:
    """Seconds below two minutes, minutes below two hours, else hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def visible(value: Any, limit: int = _MAX_TEXT) -> Any:
    """Return text, also that in lists and tables, so that it cannot hide, reorder or flood anything. Markup is ours."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return _HIDDEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", cut(value, limit))
    if isinstance(value, dict):
        return {visible(key): visible(each, limit) for key, each in value.items()}
    return [visible(each, limit) for each in value] if isinstance(value, list | tuple) else value


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, with the number of those left out: where the whole is wanted."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} ... ({counted(len(text) - limit, 'more character')})"
