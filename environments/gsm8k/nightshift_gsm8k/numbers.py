"""Read the number that a statement names, e.g. `1234` in `$1,234.00 (2 fewer)`.

Numbers are exact: `50%` is `50`, `5 1/2` is `5.5`, `18k` is `18000`. An unfinished calculation (`48/2`, `20 - 2`) is
not a number: otherwise a policy would be rewarded for leaving out the last step. In a conversion (`2 hours = 120
minutes`) and in a rounding (`18.3 ≈ 18`) the last number counts. Any other statement with several numbers (`18 or 19`,
`9 = 18`) names no number.
"""

import math
import re
from fractions import Fraction

MAX_NUMBER_CHARS = 100  # a longer number is not an answer
MAX_CHARS = 1000  # a longer statement is not an answer; bounds the cost of backtracking and the digits of an int
DIGIT = re.compile("[0-9]")
_BRACKETS = re.compile(r"[(\[][^()\[\]]*[)\]]")  # remarks; not in `2(3 + 4)`, `18 (or 19)` and `18 (thousand)`
_CHANGING = re.compile(r"(?<=[0-9])(?=\([-.$0-9(])|(?=[(\[]\s*(?:in )?(?:hundred|thousand|million)s?\b)")
_OPENED = re.compile(  # `18 (or 19)`, `18 eggs (19?)`
    r"(?<=\w) ?[(\[](?=\s*(?:or|maybe|perhaps|possibly|alternatively|could|else|if)\b|[$0-9.,]+(?: maybe)?\?*[)\]]+\??)"
)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES |= {"k": 10**3, "lakh": 10**5, "m": 10**6, "mn": 10**6, "mil": 10**6, "crore": 10**7, "b": 10**9, "bn": 10**9}
_SCALES |= {"t": 10**12, "tn": 10**12}

# A statement is split into tokens. A letter stands for the kind of a token: n(umber), e(quals), b(inary) and other
# o(perators), s(ign), d(ash), v(ariable), g(roup in brackets), c(omma), j(oining), t(urning down), comp(a)ring and
# conte(x)t words, u(nits) of a compound measure, other w(ords). The patterns below match these letters.
_UNDER, _AHEAD = r"[0-9]+(?![.,]?[0-9])", r"(?=[\s$(]*[-.]?[0-9])"
_TOKEN = re.compile(rf"""(?ix)
    (?P<n>(?P<money>[$\u20ac\xa3\xa5\u20b9]\s?)?(?=\.?[0-9]|\\[dt]?frac\{{[0-9]+\}}\s*\{{[0-9])
        (?:(?P<whole>[0-9]{{1,3}}(?P<gap>[,\s'\u2019_]|\{{,\}}|\\,|,\\!)(?:[0-9]{{2,3}}(?P=gap))*[0-9]{{3}}
            |[0-9]*)(?:(?P<decimals>\.[0-9]+)|(?![0-9]|/{_UNDER}))
            (?:(?:e|\s?(?:[\xd7x*]|\\times)\s?10\^\{{?)(?P<power>[+-]?[0-9]{{1,2}})\b)?)?
        (?:\s*(?:and\s+)?(?:\\[dt]?frac\{{)?(?P<over>[0-9]+)(?:/|\}}\s*\{{)(?P<under>{_UNDER}))?
        (?P<scale>(?:[\s-]*(?:\\[a-z]+\{{\s*)?(?:dozen|hundred|thousand|lakh|million|crore|billion|trillion)s?\b)+
            |\s?(?:k|mn|mil|bn|tn|(?-i:[MBT])|(?(money)[mb]|(?!)))(?![a-z0-9]))?)
    |\*\*+|<</?[^<>]*>>|</?[a-z][^<>]*>|(?P<e>=>|->|[=\u2248\u2192\u21d2]|\\approx
        |[,;]?\s*(?:which\s)?\bround(?:s|ed)\b(?!\s+from)(?:\s+[a-z]+){{0,6}}:?{_AHEAD}
        |(?:,\s*that\ is|[,;]?\s*\bi\.?e\b\.?),?{_AHEAD})
    |(?P<o>[<>\u2264\u2265\u2260\xb1\u221a-\u221c\u03c0\xb2\xb3\xb9\u2070-\u207e]|(?<=[0-9])!
        |\b(?:half|twice|double|triple|root|sqrt|log)(?:\s+of)?{_AHEAD}|\band\ \w+[\ -](?:half|third|quarter)
        |\b(?:squared|cubed|factorial|halves|thirds|tenths|hundredths|thousandths)\b|\\(?:sqrt|[dt]?frac|pi|pm|log)
        |\b(?:hundred|thousand|million|billion)s?\b:?{_AHEAD}|\bis\ (?:wrong|incorrect)\b)
    |(?P<b>[*/\xd7\xb7\xf7^]|\\(?:times|cdot|div)|\b(?:plus|times|divided\ by|multiplied\ by){_AHEAD})
    |(?P<d>(?<=[a-z])\s+[-\u2013]\s+)|(?P<s>[-\u2212\u2013+]|\b(?:minus|negative){_AHEAD})
    |(?P<v>(?<![a-z])(?:[xyzn]|pi|(?<=[0-9])i)(?![a-z]))|(?P<g>\u25a1)|(?P<c>[,;:\u2014]|\.(?=\s))|\\(?:[a-z]+|.)
    |\b(?:(?P<j>or|to|and)|(?P<t>not|never|than|\w+n['\u2019]t)|(?P<a>more|fewer|less)|(?P<u>hours|minutes|days|feet)
        |(?P<x>because|since|as|which|for|in|per|after|before|from|by|of|at|with|when|if|on|where|out))\b
    |(?P<w>[^\W\d_]+(?:\}}?\^?\{{?[23\xb2\xb3](?![0-9]))?)""")
_W, _S = "[ajtuwx]", "[bdegosv]"  # words, signs
# Operators connect numbers to a chain, `x = 2 + 4 = 6`. A side of the chain that is a single number is an answer.
_CHAIN = re.compile(rf"([^n]*?)({_S}*n(?:[^cn]*[bdosv]n|(?=[^cn]*e){_S}*(?:{_W}[bdegos]*){{0,2}}n)*{_S}*)")
_PLAIN = re.compile(rf"(?:(?:[vgd]|{_W})*|{_W}*s)n(?:[sgd]|b(?!g)|{_W})*")
_DENIED = re.compile("t[^cx]?j?$")  # `not 18`, `more than 18`
_REMARK = re.compile("x(?!.*j$)[^c]*$")  # `because 2 + 4 = 6`
_JOINED = re.compile("[cju]*(?:[^cju][cju]*[cj])?")  # `17, 18`, `17 or 18`, `3 hours 18 minutes`


def read(statement: str, is_prose: bool = False) -> tuple[Fraction, str] | None:
    """Return the number that `statement` names, with its text; None if there is no such number, or more than one. In
    prose, numbers may explain the answer, so the last number counts."""
    statement = _OPENED.sub(", ", statement)
    statement = outside = _CHANGING.sub("\xb1", statement if len(statement) <= MAX_CHARS else "")
    for _ in range(5):  # levels of brackets
        outside = _BRACKETS.sub(" \u25a1 ", outside)
    statement = outside if DIGIT.search(outside) else statement
    tokens = [token for token in _TOKEN.finditer(statement) if token.lastgroup]
    kinds = "".join(token.lastgroup or "" for token in tokens)
    chains: list[dict[Fraction, str]] = []
    before, is_equation = "", False
    for chain in _CHAIN.finditer(kinds):
        numbers: dict[Fraction, str] = {}
        earlier: dict[Fraction, str] = {}
        before_unit = ""
        for side in re.finditer("[^e]+", chain[2]):
            index = chain.start(2) + side.start() + side[0].find("n")
            text, value = tokens[index][0].strip(), _value(tokens[index]) if _PLAIN.fullmatch(side[0]) else None
            unit = tokens[index + 1][0].lower().rstrip("s") if kinds[index + 1 : index + 2] in ("u", "w") else ""
            unit = unit or (tokens[index]["money"] or "").strip()
            link = tokens[chain.start(2) + side.start() - 1][0] if side.start() else "="
            is_converted = unit and before_unit and unit != before_unit  # `2 hours = 120 minutes`
            is_rounded = link != "=" and any("." in number or "/" in number for number in numbers.values())
            if value is None or "/" in text or is_converted or is_rounded:
                earlier, numbers = numbers, {}  # the result follows: `10/3 = 3.33`
            before_unit = unit
            if value is not None:
                sign = "-" if kinds[:index].endswith("s") and tokens[index - 1][0] != "+" else ""
                (earlier if "/" in text else numbers)[-value if sign else value] = sign + text
        numbers = numbers or earlier
        previous, before = before, chain[1]
        is_after_equation, is_equation = is_equation, "e" in chain[2]
        is_joined = not is_equation and _JOINED.fullmatch(before) and not ("c" in before and "x" in previous[-2:])
        is_zero = is_joined and not any(numbers) and before.strip("cj")  # `and 0 seconds`
        is_compared = not is_equation and kinds.startswith("a", chain.end())  # `2 fewer`
        is_remark = is_after_equation and re.fullmatch("w?x", before) if is_prose else _REMARK.search(before)
        is_denied = not is_equation and _DENIED.search(before)
        if numbers and not is_denied and not (chains and (is_zero or is_compared or is_remark)):
            if is_prose and not is_joined:
                chains.clear()
            chains.append(numbers)
    answers = {value: text for numbers in chains for value, text in numbers.items()}
    return next(iter(answers.items())) if len(answers) == 1 else None


def _value(number: re.Match[str]) -> Fraction | None:
    """Return the number of a token; None for a number that is too long, and for a fraction not in lowest terms."""
    over, under = int(number["over"] or 0), int(number["under"] or 1)
    if Fraction(over, under or 1).denominator != under or len(number[0]) > MAX_NUMBER_CHARS:
        return None
    value = Fraction("".join(DIGIT.findall(number["whole"] or "0")) + (number["decimals"] or ""))
    value = value * Fraction(10) ** int(number["power"] or 0) + Fraction(over, under)
    scales = re.findall(r"(?<!\\)\b[a-z]+", (number["scale"] or "").lower())
    return value * math.prod(_SCALES[scale.rstrip("s")] for scale in scales)
