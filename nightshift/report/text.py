"""How the morning page says things: the verdict sentence, numbers with their units, hostile text made visible."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from markupsafe import Markup

from nightshift.campaign.form import compare
from nightshift.records import Verdict
from nightshift.report.data import Experiment, Morning, counted

NOT_MEASURED = "not measured"
_MINUS = "\N{MINUS SIGN}"
_ARROW = "\N{RIGHTWARDS ARROW}"
# Text that is not to be shown as it is: controls but for tab and newline, lone surrogates, and the
# characters that reorder or hide other text.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_MAX_TEXT = 4000  # characters of any one text


def verdict(e: Experiment) -> str:
    """What became of an experiment, in words."""
    return e.since if e.is_taken_back else f"{e.kind}, {e.since}" if e.since else e.kind


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict: `title` is its short form, `sentence` has the numbers, `tone` is good, open, none or bad."""

    title: str
    sentence: str
    tone: str


def headline(morning: Morning) -> Headline:
    """Did it get better, and by how much really? Posterior means only: a best raw score is lucky by selection."""
    standing, count = morning.standing, len(morning.experiments)
    if not count:
        return Headline("Nothing has been run yet", "The first experiment of a campaign measures its baseline.", "none")
    if morning.count(Verdict.CRASH) == count:
        return Headline("Nothing has been measured", f"{counted(count)}, and every one crashed.", "bad")
    if standing is None:
        return Headline("Nothing has been measured yet", "No experiment has its verdict yet.", "none")
    if count == 1:
        sentence = "Only the baseline has been measured; there is nothing to compare it with."
        return Headline(f"Baseline: {score(standing.baseline)}", sentence, "none")
    if len(morning.chain) <= 1:
        later = " for good" if morning.kept else ""
        sentence = f"{counted(count - 1)} after the baseline, none kept{later}. "
        sentence += f"The baseline is believed to score {score(standing.baseline)}."
        return Headline("No gain so far", sentence, "open")
    change = f"{score(standing.baseline)} {_ARROW} {score(standing.incumbent)}"
    sentence = f"Expected gain of the incumbent over the baseline: {points(standing.difference)} "
    sentence += f"(95 % interval {_span(standing.difference_interval)})."
    form = compare(morning.chain[-1].record, morning.chain[0].record)
    if form and form.conclusion:
        strict = f"strict score {score(form.before.strict)} {_ARROW} {score(form.after.strict)}"
        sentence += f" Raw {strict}, score {points(form.gain)}: {form.conclusion}."
    if standing.difference_interval[0] > 0:
        return Headline(f"Better: {change}", sentence, "good")
    if standing.difference > 0:
        return Headline(f"Perhaps better: {change}", f"{sentence} The interval includes no gain at all.", "open")
    return Headline(f"No gain: {change}", sentence, "open")


def certificate_line(morning: Morning) -> str:
    """One sentence: what the sealed set says of baseline and incumbent."""
    if (c := morning.certificate) is None:
        return "Not certified yet: no fresh seed and no sealed example has confirmed it (uv run nightshift certify)."
    strict = f"; strict {score(c.strict_scores[0])} {_ARROW} {score(c.strict_scores[1])}" if c.strict_scores else ""
    apart = "".join(f"; {d.environment} alone {points(d.difference)}, {_span(d.interval)}" for d in c.environments)
    line = (
        f"Certified on {c.num_examples:,} sealed examples with {c.num_seeds['baseline']} and "
        f"{c.num_seeds['incumbent']} fresh seeds: {score(c.baseline_score)} {_ARROW} {score(c.incumbent_score)}, "
        f"{points(c.difference)}, 95 % interval {_span(c.interval)}{strict}{apart}. "
        f"The sealed set was opened {counted(c.sealed_looks, 'time')}."
    )
    return f"Not of this incumbent: {morning.obsolete}. {line}" if morning.obsolete else line


def transfer_lines(morning: Morning) -> list[str]:
    """A sentence for each question that was asked of the campaign's incumbents elsewhere."""
    lines = []
    for a in morning.transfers:
        models = f" Two models: {a.model} there, {a.model_here} here." if a.model != a.model_here else ""
        lines.append(
            f"Elsewhere: {a.to}, {a.budget_seconds:g} s of training: {a.verdict}, experiment {a.incumbent:04d} "
            f"{points(a.difference)} over the baseline, 95 % interval {_span(a.interval)}; here "
            f"{points(a.here)}, {_span(a.here_interval)} (believed).{models}"
            + "".join(f" {note[:1].upper()}{note[1:]}." for note in a.notes)
        )
    return lines


def _span(interval: tuple[float, float]) -> str:
    return f"{signed(100 * interval[0])} to {points(interval[1])}"


def score(value: float | None) -> str:
    """A score as a fraction, 0..1."""
    return NOT_MEASURED if value is None else f"{value:.3f}"


def signed(value: float) -> str:
    """A number with its sign; zero has none."""
    text = f"{abs(value):.1f}"
    return text if float(text) == 0 else f"{'+' if value > 0 else _MINUS}{text}"


def points(value: float | None) -> str:
    """A difference of scores in percentage points."""
    return NOT_MEASURED if value is None else f"{signed(100 * value)} pp"


def expected(e: Experiment) -> str:
    """The difference of an experiment from its incumbent, with half of its 95 % interval."""
    return points(e.delta) + ("" if e.delta_spread is None else f" ± {100 * e.delta_spread:.1f}")


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
    """At most `limit` characters, with the number of those left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} ... ({len(text) - limit:,} more characters)"
