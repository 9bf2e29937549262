"""How the morning page says things: the verdict sentence, numbers with their units, hostile text made visible."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from markupsafe import Markup

from nightshift import text
from nightshift.agents.history import KeyHistory
from nightshift.campaign.campaign import compare
from nightshift.campaign.records import (
    NO_DIFFERENCE,
    SIDES,
    Z95,
    Comparison,
    Effect,
    Record,
    Stage,
    Standing,
    percent,
)
from nightshift.campaign.results import contradiction, decisions_text, gain_text, last_scores
from nightshift.report.data import Morning, counted
from nightshift.report.timing import Night

NOT_MEASURED, UNKNOWN = "not measured", "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
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


def headline(morning: Morning) -> Headline:
    """Did it get better, and by how much? The reported gain, not the best raw score: that one is too high."""
    num, verdicts, standing = len(morning.experiments), morning.counts.verdict, morning.standing
    if standing is None:
        is_failure = verdicts.get("crash", 0) + verdicts.get("interrupted", 0) == num
        first = "The first experiment of a campaign measures its baseline."
        rows = [(num == 0, "Nothing has been run yet", first, "none")]
        rows.append((is_failure, "Nothing has been measured", f"{morning.counts}.", "bad"))
        rows.append((True, "Nothing has been measured yet", "No experiment has its verdict yet.", "none"))
    else:
        baseline = morning.baseline.number if morning.baseline else 0  # crashes may have come before it
        later = [e for e in morning.experiments if e.number > baseline and e.record.decided]
        certificate = None if morning.obsolete else morning.certificate
        gain, remarks = _minus(gain_text(standing)), "".join(_remarks(morning))
        only = "Only the baseline has been measured; there is nothing to compare it with."
        none = f"{counted(len(later))} after the baseline, none kept{' now' if morning.left else ''}. "
        none += f"The estimated score of the baseline is {score(standing.baseline)}.{remarks}"
        rows = [(not later, f"Baseline: {score(standing.baseline)}", only, "none")]
        rows.append((not morning.kept, "No gain so far", none, "open"))
        scores = f"{score(standing.baseline)} {_ARROW} {incumbent_score(standing)}"
        if certificate:  # one gain comes first, the certified one: the title never claims more
            difference, interval = points(certificate.estimate.difference), _span(certificate.estimate.interval)
            sentence = f"Certified gain of the incumbent over the baseline: {difference} (95 % interval {interval}). "
            sentence += f"The campaign's own estimate is {gain} ({scores}), which {_agreement(certificate, standing)}."
            title, tone = _CERTIFIED.get(certificate.verdict, (certificate.verdict, "open"))
            crashes = f" ({certificate.crashes})" if certificate.crashes else ""
            rows.append((True, f"{title}, certified: {difference}{crashes}", sentence + remarks, tone))
        sentence = f"Gain of the incumbent over the baseline: {gain} ({scores}).{remarks}"
        rows.append((standing.gain > standing.gain_halfwidth, f"Better: {gain}", sentence, "good"))
        perhaps = f"{sentence} The interval includes no gain at all."
        rows.append((standing.gain > 0, f"Perhaps better: {gain}", perhaps, "open"))
        rows.append((True, "No gain so far", sentence, "open"))
    return next(Headline(*words) for holds, *words in rows if holds)


def _agreement(certificate: Comparison, standing: Standing) -> str:
    """Return whether the interval of the campaign's estimate and that of the certificate overlap, in words."""
    low, high = certificate.estimate.interval
    if low <= standing.gain + standing.gain_halfwidth and standing.gain - standing.gain_halfwidth <= high:
        return "agrees with the certificate"
    word = "higher" if standing.gain > high else "lower"
    return f"is {word}: the certificate counts, because its seeds and its examples are fresh"


def _remarks(morning: Morning) -> Iterator[str]:
    """Yield what the final check runs scored, whether they contradict the estimate, and whether more than the answer
    format was learnt."""
    if (standing := morning.standing) and (runs := morning.final_runs):
        if sentence := contradiction(standing):
            yield f" {_minus(sentence)}: {last_scores(runs)}."
        else:
            stages = [run.run.stage for run in runs if run.score is not None]
            is_few = min(stages.count(Stage.LAST_BASELINES), stages.count(Stage.LAST_INCUMBENTS)) < 2
            words = "are too few to check the estimate" if is_few else "agree with the estimate"
            yield f" The final check runs {words}: {last_scores(runs)}."
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
    """`0.500 -> 0.600, +10.0 pp, 95 % interval +4.0 to +16.0 pp`, and what else was measured."""
    strict = f"; strict {score(c.strict_scores[0])} {_ARROW} {score(c.strict_scores[1])}" if c.strict_scores else ""
    each = c.by_environment.items()
    parts = "".join(f"; {name} alone {points(e.difference)}, {_span(e.interval)}" for name, e in each)
    change = f"{score(c.score('baseline'))} {_ARROW} {score(c.score('incumbent'))}, {points(c.estimate.difference)}"
    return f"{change}, 95 % interval {_span(c.estimate.interval)}{strict}{parts}"


def _runs(c: Comparison) -> str:
    """Return the score and the steps of each run, and how many collapsed or crashed."""
    return " ".join(f"{part}." for part in (f"Scores in %: {c.runs_text}", c.collapses, c.crashes) if part)


def _span(interval: tuple[float, float]) -> str:
    return f"{signed(100 * interval[0])} to {points(interval[1])}"


def score(value: float | None, none: str = NOT_MEASURED) -> str:
    return none if value is None else f"{value:.3f}"


def incumbent_score(standing: Standing) -> str:
    """The incumbent's estimated score: to the digits that are shown it is the baseline's plus the gain."""
    return score(round(standing.baseline, 3) + round(standing.gain, 3))


def signed(value: float) -> str:
    """A number with its sign; zero has none."""
    text = f"{abs(value):.1f}"
    return text if float(text) == 0 else f"{'+' if value > 0 else _MINUS}{text}"


def points(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{signed(100 * value)} pp"


def effect(value: Effect | None) -> str:
    """`+2.4 ± 4.9 pp`; a dash where nothing is known."""
    return _minus(str(value)) if value else UNKNOWN


def _minus(text: str) -> str:
    return text.replace("-", _MINUS)


def plus_minus(value: Effect | None) -> str:
    """The same without its unit, for a column that names it."""
    return effect(value).removesuffix(" pp")


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{percent(value)} %"


def besides(record: Record) -> str:
    """Return what a run did besides its new change: `also re-testing 0007; 0003 reverted`, and the guard that forbids
    the change; empty for nothing."""
    guards = [part for part in record.why.split("; ") if " not kept: guard " in part]
    return "; ".join(filter(None, (record.run.with_rider.strip(" ()"), decisions_text(record.moved), *guards)))


def half(stderr: float) -> float:
    """What stands behind every ±: half of the 95 % interval."""
    return Z95 * stderr


def local(moment: datetime | str) -> str:
    """A moment on this machine's clock, with its zone."""
    return text.local(datetime.fromisoformat(moment) if isinstance(moment, str) else moment)


def duration(seconds: float) -> str:
    """Seconds below two minutes, minutes below two hours, else hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def short_number(value: float) -> str:
    """Three significant digits, without an exponent where that is readable."""
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def visible(value: Any, limit: int = _MAX_TEXT) -> Any:
    """Return text, also that in lists and tables, so that it cannot hide, reorder or flood anything. Markup is ours."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return _HIDDEN.sub(_named, cut(value, limit))
    if isinstance(value, dict):
        return {visible(key): visible(each, limit) for key, each in value.items()}
    return [visible(each, limit) for each in value] if isinstance(value, list | tuple) else value


def _named(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # the picture of the control
    name = unicodedata.name(match[0], "")
    return f"[U+{code:04X}{' ' + name if name else ''}]"


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, with the number of those left out: where the whole is wanted."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} ... ({counted(len(text) - limit, 'more character')})"


def brief(text: str, limit: int) -> str:
    """At most `limit` characters on one line, an ellipsis at a word: where one sees that there is more."""
    line = " ".join(text[: 8 * limit].split())
    if len(line) <= limit and len(text) <= 8 * limit:
        return line
    head = line[: limit - 1]
    word = head.rpartition(" ")[0]
    return (word if len(word) > limit // 2 else head).rstrip(" ,;:.") + "\N{HORIZONTAL ELLIPSIS}"
