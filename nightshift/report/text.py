"""How the morning page says things: the verdict sentence, numbers with their units, hostile text made visible."""

import re
import unicodedata
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup

from nightshift import text
from nightshift.campaign.records import Z95, Effect, Record, Standing, percent
from nightshift.campaign.results import decisions_text
from nightshift.campaign.scores import compare
from nightshift.experiment.certify import Comparison
from nightshift.experiment.estimate import NO_DIFFERENCE
from nightshift.report.data import Experiment, Morning, counted

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


def verdict(e: Experiment) -> str:
    return f"{e.group}, {e.since}" if e.since else e.group


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict: `title` is its short form, `sentence` has the numbers, `tone` is good, open, none or bad."""

    title: str
    sentence: str
    tone: str


def headline(morning: Morning) -> Headline:
    """Did it get better, and by how much? The reported gain, not the best raw score: that one is too high."""
    standing, count = morning.standing, len(morning.experiments)
    if not count:
        return Headline("Nothing has been run yet", "The first experiment of a campaign measures its baseline.", "none")
    if morning.counts.crashed + morning.counts.interrupted == count:
        told = ", ".join(f"{number} {word}" for _, number, word, _ in counts(morning) if number)
        return Headline("Nothing has been measured", f"{counted(count)}: {told}.", "bad")
    if standing is None:
        return Headline("Nothing has been measured yet", "No experiment has its verdict yet.", "none")
    baseline = morning.baseline.number if morning.baseline else 0  # crashes may have come before it
    later = [e for e in morning.experiments if e.number > baseline and e.record.judgement]
    if not later:
        sentence = "Only the baseline has been measured; there is nothing to compare it with."
        return Headline(f"Baseline: {score(standing.baseline)}", sentence, "none")
    if not morning.kept:
        for_good = " for good" if morning.counts.kept else ""
        sentence = f"{counted(len(later))} after the baseline, none kept{for_good}. "
        sentence += f"The baseline is believed to score {score(standing.baseline)}."
        return Headline("No gain so far", _with_last_runs(sentence, morning), "open")
    low, gain = standing.gain_interval[0], f"{signed(100 * standing.gain)} ± {100 * standing.gain_halfwidth:.1f} pp"
    scores = f"{score(standing.baseline)} {_ARROW} {incumbent_score(standing)}"
    certificate = None if morning.obsolete else morning.certificate
    if certificate:  # one gain comes first, the certified one
        result = certificate.estimate
        sentence = f"Certified gain of the incumbent over the baseline: {points(result.difference)} (95 % interval "
        sentence += f"{_span(result.interval)}). The campaign's own estimate is {gain} ({scores})."
    else:
        sentence = f"Gain of the incumbent over the baseline: {gain} ({scores})."
    sentence = _with_last_runs(sentence, morning)
    last = morning.campaign.incumbent_run or morning.campaign.parent
    form = compare(last, morning.campaign.baseline) if last and morning.campaign.baseline else None
    if form and form.conclusion:
        strict = f"strict score {f' {_ARROW} '.join(map(score, form.strict_scores))}"
        sentence += f" Raw {strict}, score {points(form.gain)}: {form.conclusion}."
    if certificate:  # also for no significant difference: the title never claims more than the certificate
        title, tone = _CERTIFIED.get(certificate.verdict, (certificate.verdict, "open"))
        return Headline(f"{title}, certified: {points(certificate.estimate.difference)}", sentence, tone)
    if standing.gain > 0 >= low:
        sentence += " The interval includes no gain at all."
    if low > 0:
        return Headline(f"Better: {gain}", sentence, "good")
    return Headline(f"Perhaps better: {gain}" if standing.gain > 0 else "No gain so far", sentence, "open")


def _with_last_runs(sentence: str, morning: Morning) -> str:
    runs = morning.last_runs
    return f"{sentence} {runs[:1].upper()}{runs[1:]}." if runs else sentence


def counts(morning: Morning) -> list[tuple[str, int, str, str]]:
    """What the experiments came to: group, how many, the word for it, and what is to be said beside it or "".

    A kept change is counted also when it left the incumbent.
    """
    found = morning.counts
    left = [f"{found.reverted} reverted"] if found.reverted else []
    left += [f"{found.replaced} replaced"] if found.replaced else []
    return [
        ("keep", found.kept, "kept", ", ".join(left)),
        ("discard", found.discarded, "discarded", f"{found.adopted} adopted later" if found.adopted else ""),
        ("measured", found.measured, "measured again", ""),
        ("crash", found.crashed, "crashed", ", ".join(f"{n} by {cause}" for cause, n in morning.crash_causes.items())),
        ("interrupted", found.interrupted, "interrupted", ""),
    ]


def certificate_line(morning: Morning) -> str:
    """One sentence: what the test split says of baseline and incumbent."""
    if (c := morning.certificate) is None:
        return (
            morning.obsolete or "Not certified yet: nothing was measured on the test split (uv run nightshift certify)."
        )
    seeds = (c.num_seeds["baseline"], c.num_seeds["incumbent"])
    told = "1 fresh seed each" if seeds == (1, 1) else f"{seeds[0]} and {seeds[1]} fresh seeds"
    line = (
        f"Certified on {counted(c.num_examples, 'test example')} with {told}: {_measured(c)}: {c.verdict}, at level "
        f"{c.level:.3g}. It was access {c.access} to the test split by this campaign."
    )
    return f"Not of this incumbent: {morning.obsolete}. {line}" if morning.obsolete else line


def elsewhere_lines(morning: Morning) -> list[str]:
    """A sentence for each comparison on another environment, or with another budget."""
    return [
        f"Elsewhere: {'+'.join(c.environments)}, {c.budget_seconds:g} s of training, {c.model}: {c.verdict}, "
        f"{c.plan.names['incumbent']} against {c.plan.names['baseline']}: {_measured(c)}."
        + "".join(f" {note[:1].upper()}{note[1:]}." for note in c.notes)
        for c in morning.elsewhere
    ]


def _measured(c: Comparison) -> str:
    """`0.500 -> 0.600, +10.0 pp, 95 % interval +4.0 to +16.0 pp`, and what else was measured."""
    strict = f"; strict {score(c.strict_scores[0])} {_ARROW} {score(c.strict_scores[1])}" if c.strict_scores else ""
    each = c.by_environment.items()
    parts = "".join(f"; {name} alone {points(e.difference)}, {_span(e.interval)}" for name, e in each)
    change = f"{score(c.baseline_score)} {_ARROW} {score(c.incumbent_score)}, {points(c.estimate.difference)}"
    return f"{change}, 95 % interval {_span(c.estimate.interval)}{strict}{parts}"


def _span(interval: tuple[float, float]) -> str:
    return f"{signed(100 * interval[0])} to {points(interval[1])}"


def score(value: float | None, none: str = NOT_MEASURED) -> str:
    return none if value is None else f"{value:.3f}"


def incumbent_score(standing: Standing) -> str:
    """The incumbent's believed score: to the digits that are shown it is the baseline's plus the gain."""
    return score(round(standing.baseline, 3) + round(standing.gain, 3))


def signed(value: float) -> str:
    """A number with its sign; zero has none."""
    text = f"{abs(value):.1f}"
    return text if float(text) == 0 else f"{'+' if value > 0 else _MINUS}{text}"


def points(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{signed(100 * value)} pp"


def effect(value: Effect | None) -> str:
    """`+2.4 ± 4.9 pp`; a dash where nothing is known."""
    return str(value).replace("-", _MINUS) if value else UNKNOWN


def plus_minus(value: Effect | None) -> str:
    """The same without its unit, for a column that names it."""
    return effect(value).removesuffix(" pp")


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{percent(value)} %"


def contents(record: Record) -> str:
    """What a run held besides its new change: `the baseline with 0003, 0005; 0007 measured again`."""
    run = record.run
    names = ", ".join(change.name for change in run.kept)
    held = f"the baseline with {names}" if names else "the baseline"
    return f"{held}; {run.rider.name} measured again" if run.rider else held


def besides(record: Record) -> str:
    """What an experiment was besides its new change: `with 0007 again; 0003 reverted`; empty where it was nothing."""
    return "; ".join(filter(None, (record.run.with_rider.strip(" ()"), decisions_text(record.moved))))


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


def visible(value: object) -> object:
    """Jinja's finalize: text from outside cannot hide, reorder, flood or break anything. Markup is our own."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return _HIDDEN.sub(_named, cut(value, _MAX_TEXT))
    return value


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
