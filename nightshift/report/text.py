"""The words of page and report.md: the headline, numbers with their units, hostile text made visible."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from markupsafe import Markup

from nightshift.campaign.records import SIDES, Comparison, Effect, Stage
from nightshift.campaign.results import contradiction, decisions_text, estimates, gain_text, last_scores, percents
from nightshift.report.data import BY_USER, Experiment, Morning, obsolete
from nightshift.text import clean, counted

UNKNOWN = "\N{EN DASH}"
_ARROW = " \N{RIGHTWARDS ARROW} "
_INCUMBENT = "the incumbent (the baseline with the kept changes) over the baseline"
_TONES = {"better": "good", "worse": "bad"}  # of a certificate's verdict
# Controls but for tab and newline, lone surrogates, and the characters that reorder or hide other text.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_MAX_TEXT = 4000  # characters of any one text


@dataclass(frozen=True)
class Headline:
    """The result in short (`title`) and with its numbers (`sentence`). `tone`: good, open or bad."""

    title: str
    sentence: str
    tone: str = "open"


def headline(morning: Morning) -> Headline:
    """Say whether the incumbent is better and by how much. The best raw score is never the answer: it is too high."""
    standing = morning.standing
    if standing is None:
        return Headline("Nothing has been measured yet", f"{morning.counts}.")
    first = morning.story.campaign.baseline  # crashes may have come before it
    later = [e for e in morning.experiments if first and e.number > first.number and e.record.decided]
    if not later:
        words = "Only the baseline has been measured; there is nothing to compare it with."
        return Headline(f"Baseline: {percents(standing.baseline)}", words)
    gain, remarks = gain_text(standing), "".join(_remarks(morning))
    if not morning.story.campaign.kept:
        names = ", ".join(f"{e.number:04d}" for e in morning.experiments if e.fate == BY_USER)
        kept = f"none kept now{f' (you reverted {names})' if names else ''}"
        return Headline("No gain so far", f"{counted(len(later))} after the baseline, {kept}.{remarks}")
    if certificate := morning.certificate:  # the certified gain comes first: the title never claims more
        difference, interval = points(certificate.estimate.difference), _span(certificate.estimate.interval)
        low, high = certificate.estimate.interval
        agreement = "whose interval overlaps the certificate's"
        if low > standing.gain + standing.gain_halfwidth or standing.gain - standing.gain_halfwidth > high:
            word = "higher" if standing.gain > high else "lower"
            agreement = f"which is {word}: the certificate counts, because its seeds and its examples are fresh"
        note = f"; {certificate.estimate.note}" if certificate.estimate.note else ""
        words = f"Certified gain of {_INCUMBENT}: {difference} (95 % interval {interval}{note}). "
        words += f"The campaign's own estimate is {gain} ({estimates(standing)}), {agreement}.{remarks}"
        crashes = f" ({certificate.crashes})" if certificate.crashes else ""
        title = f"{certificate.verdict.capitalize()}, certified: {difference}{crashes}"
        return Headline(title, words, _TONES.get(certificate.verdict, "open"))
    words = f"Estimated gain of {_INCUMBENT}, not certified: {gain} ({estimates(standing)}).{remarks}"
    if standing.gain > standing.gain_halfwidth:
        return Headline(f"Better, not certified: {gain}", words, "good")
    words += " The interval includes no gain at all." if abs(standing.gain) <= standing.gain_halfwidth else ""
    return Headline(f"Perhaps better, not certified: {gain}" if standing.gain > 0 else "No gain so far", words)


def _remarks(morning: Morning) -> Iterator[str]:
    """Yield what the final check runs scored, and whether they contradict the estimate."""
    records = (e.record for e in reversed(morning.experiments))
    runs = [*takewhile(lambda record: record.run.stage is not Stage.SEARCH, records)][::-1]  # none if others followed
    if morning.standing and runs:
        words = contradiction(morning.standing) or "The final check runs do not contradict the estimate"
        yield f" {words}. Their measured scores: {last_scores(runs)}."


def certificate_line(morning: Morning) -> str:
    """Return what was measured on the test split of baseline and incumbent."""
    if (c := morning.certificate) is None:
        why, campaign = "nothing was measured on the test split", morning.story.campaign
        if old := morning.obsolete:
            why = f"{obsolete(old.plan, campaign)}: {old.verdict}, {measured(old)}"
            why = f"the last certificate is not of this incumbent: {why}"
        command = "uv run nightshift certify" if campaign.kept else "now no change is kept"
        return f"Not certified yet: {why} ({command})."
    return (
        f"Certified on {counted(c.num_examples, 'test example')} with {counted(c.plan.num_seeds, 'fresh seed')} for "
        f"each config: {measured(c)}: {c.verdict}, at level {c.level:.3g}. Use {c.access} of the test split by this "
        f"campaign. Scores in %: {c.runs_text}."
    )


def measured(c: Comparison) -> str:
    """Return `50.0 % -> 60.0 %, +10.0 pp, 95 % interval +4.0 to +16.0 pp`, and the scores in the requested format and
    by environment."""
    scores, strict_scores = (_ARROW.join(map(percents, pair)) for pair in (map(c.score, SIDES), c.strict_scores or ()))
    strict = f"; in the requested format {strict_scores}" if strict_scores not in ("", scores) else ""
    items = c.by_environment.items()
    parts = "".join(f"; {name} alone {points(e.difference)}, {_span(e.interval)}" for name, e in items)
    return f"{scores}, {points(c.estimate.difference)}, 95 % interval {_span(c.estimate.interval)}{strict}{parts}"


def gain_parts(morning: Morning) -> str:
    """Return why the effects of the kept changes do not add up to the gain."""
    kept = morning.story.campaign.effects
    effects = points(sum(effect.mean for _, effect in kept))
    if morning.standing and morning.standing.contradicted:
        return f"The effects add up to {effects}; the total is the plain difference of the final check runs."
    if len(kept) == 1:
        total = morning.standing and points(morning.standing.gain)
        why = "The total is the effect, lowered because the best of many noisy scores is too high."
        return "" if total == effects else why
    return (
        f"The effects add up to {effects}, which is not the total. An effect is what a change adds to the others. A "
        "replaced change has no row, but its effect may still be in the total, which is then higher. And the total is "
        "lowered, because the best of many noisy scores is too high."
    )


def remark(e: Experiment) -> str:
    """Return why an experiment crashed, or what its run did besides its new change: `also re-testing 0007; 0003
    reverted`, and why the incumbent does not contain the change any more."""
    if e.verdict == "crash":
        return clean(e.record.why, 160)
    moved = decisions_text(e.record.moved)
    return "; ".join(filter(None, (e.record.run.with_rider.strip(" ()"), moved, e.fate)))


def score(value: float | None) -> str:
    return UNKNOWN if value is None else percents(value)


def points(value: float) -> str:
    return f"{round(100 * value, 1) + 0.0:+.1f} pp"


def _span(interval: tuple[float, float]) -> str:
    return f"{points(interval[0]).removesuffix(' pp')} to {points(interval[1])}"


def plus_minus(value: Effect | None) -> str:
    """Return `+2.4 ± 4.9`; a dash for None."""
    return str(value).removesuffix(" pp") if value else UNKNOWN


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
