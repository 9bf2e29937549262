"""How the morning page says things: the verdict sentence, numbers with their units, hostile text made visible."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from markupsafe import Markup

from nightshift.records import Verdict
from nightshift.report.data import Z95, Certified, Experiment, Morning

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
_MARKDOWN = re.compile(r"([\\`*\[\]<#|~$&!@]|(?<!\w)_|_(?!\w)|(?<=:)/)")


def verdict(e: Experiment) -> str:
    """What became of an experiment, in words."""
    return {"baseline": "baseline", "back": "taken back"}.get(e.kind, e.kind)


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict: `title` is its short form, `sentence` has the numbers, `tone` is good, open, none or bad."""

    title: str
    sentence: str
    tone: str


def headline(morning: Morning) -> Headline:
    """Did it get better, and by how much really? Posterior means only: a best raw score is lucky by selection."""
    standing = morning.standing
    if not morning.experiments:
        return Headline("Nothing has been run yet", "The first experiment of a campaign measures its baseline.", "none")
    if standing is None:
        if morning.count(Verdict.CRASH) == len(morning.experiments):
            return Headline(
                "Nothing has been measured",
                f"{_counted(len(morning.experiments), 'experiment')}, and every one crashed.",
                "bad",
            )
        return Headline("Nothing has been measured yet", "No experiment has its verdict yet.", "none")
    if len(morning.chain) <= 1:
        later = " for good" if morning.kept else ""
        tried = len(morning.experiments) - 1
        if tried == 0:
            sentence = "Only the baseline has been measured; there is nothing to compare it with."
            return Headline(f"Baseline: {score(standing.baseline)}", sentence, "none")
        sentence = f"{_counted(tried, 'experiment')} after the baseline, none kept{later}. "
        sentence += f"The baseline is believed to score {score(standing.baseline)}."
        return Headline("No gain so far", sentence, "open")
    change = f"{score(standing.baseline)} {_ARROW} {score(standing.incumbent)}"
    expected = f"Expected gain of the incumbent over the baseline: {points(standing.difference)}"
    if standing.difference_sd is None:
        word = "Perhaps better" if standing.difference > 0 else "No gain"
        return Headline(f"{word}: {change}", f"{expected} (95 % interval {NOT_MEASURED}).", "open")
    half = Z95 * standing.difference_sd
    low, high = standing.difference - half, standing.difference + half
    sentence = f"{expected} (95 % interval {signed(100 * low)} to {points(high)})."
    if low > 0:
        return Headline(f"Better: {change}", sentence, "good")
    if standing.difference > 0:
        return Headline(f"Perhaps better: {change}", f"{sentence} The interval includes no gain at all.", "open")
    return Headline(f"No gain: {change}", sentence, "open")


def certificate_line(certified: Certified | None) -> str:
    """One sentence: what the sealed set says of baseline and incumbent."""
    if certified is None:
        return "Not certified yet: no fresh seed and no sealed example has confirmed it (uv run nightshift certify)."
    c = certified.certificate
    low, high = c.interval
    line = (
        f"Certified on {c.num_examples:,} sealed examples with {c.num_seeds['baseline']} and "
        f"{c.num_seeds['incumbent']} fresh seeds: {score(c.baseline_score)} {_ARROW} {score(c.incumbent_score)}, "
        f"{points(c.difference)}, 95 % interval {signed(100 * low)} to {points(high)}. "
        f"The sealed set was opened {c.sealed_looks} time{'s' if c.sealed_looks != 1 else ''}."
    )
    return f"Not of this incumbent: {certified.obsolete}. {line}" if certified.obsolete else line


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def score(value: float | None) -> str:
    """A score as a fraction, 0..1."""
    return NOT_MEASURED if value is None else f"{value:.3f}"


def signed(value: float | None, digits: int = 1) -> str:
    """A number with its sign; zero has none."""
    if value is None:
        return NOT_MEASURED
    text = f"{abs(value):.{digits}f}"
    return text if float(text) == 0 else f"{'+' if value > 0 else _MINUS}{text}"


def points(value: float | None) -> str:
    """A difference of scores in percentage points."""
    return NOT_MEASURED if value is None else f"{signed(100 * value)} pp"


def duration(seconds: float | None) -> str:
    """Seconds below two minutes, minutes below two hours, else hours."""
    if seconds is None:
        return NOT_MEASURED
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def short_number(value: float | None) -> str:
    """Three significant digits, without an exponent where that is readable."""
    if value is None:
        return NOT_MEASURED
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


def markdown(text: str, limit: int = 200) -> str:
    """Text as itself in a Markdown table: one line, no markup, no link."""
    return _MARKDOWN.sub(r"\\\1", _one_line(text, limit))


def markdown_code(text: str, limit: int = 200) -> str:
    """Text in a code span of a Markdown table."""
    return "`" + _one_line(text, limit).replace("`", "'").replace("|", "\\|") + "`"


def _one_line(text: str, limit: int) -> str:
    return " ".join(str(visible(cut(text, limit))).split())
