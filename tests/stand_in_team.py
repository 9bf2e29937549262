"""A stand-in for two agents with a language model: `python -c CODE` strategist|implementer [lie], prompt on stdin.

The strategist asks for another learning rate or weight decay, in turn. After the run it says what came, and with `lie`
that all went well. The implementer writes what the hypothesis says, key by key.
It is given to `python -c`, so that it runs in bubblewrap, where nothing of the checkout can be seen.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

RATES = ("3e-6", "2e-6", "4e-6", "5e-6", "1e-5", "8e-6", "7e-6", "9e-6", "1.2e-5", "6.5e-6")


def say(**lines: str) -> None:
    text = "".join(f"{name.replace('_', ' ')}: {line}\n" for name, line in lines.items())
    Path("hypothesis.txt").write_text(text)


def reflect(brief: str, lies: bool) -> None:
    measured = re.search(r", effect ([+-][0-9.]+)", brief)
    told = "better, +9.0 pp, confirmed" if lies or measured is None else f"{measured[1]} pp"
    lines = [
        f"OUTCOME {n}: {told}\nLESSON {n}: what {n} taught\n" for n in re.findall(r"^LESSON ([0-9]+)", brief, re.M)
    ]
    Path("hypothesis.txt").write_text("".join(lines))


def think(brief: str) -> None:
    number = int(re.search(r"next experiment, ([0-9]+)", brief)[1])
    key, value = ("lr", RATES[number % len(RATES)]) if number % 2 else ("weight_decay", f"0.0{number + 1}")
    say(  # in turn: what is in flight may keep the one
        HYPOTHESIS=f"set trainer.optim.{key} = {value}",
        MECHANISM=f"larger steps, of {len([*Path('logs').iterdir()])} files of logs",
        PREDICTION="+1.0 pp",
        REFUTED_BY="a lower score",
    )


def implement(brief: str) -> None:
    key, value = re.search(r"set ([a-z_.]+) = ([0-9.e-]+)", brief).groups()
    table, _, leaf = key.rpartition(".")
    train = Path("train.toml")
    text = train.read_text()
    if re.search(rf"^{leaf} = ", text, re.MULTILINE):
        text = re.sub(rf"^{leaf} = \S+", f"{leaf} = {value}", text, flags=re.MULTILINE)
    elif f"[{table}]" in text:
        text = text.replace(f"[{table}]", f"[{table}]\n{leaf} = {value}")
    else:
        text += f"\n[{table}]\n{leaf} = {value}\n"
    train.write_text(text)


def main() -> None:
    brief = sys.stdin.read()
    if sys.argv[1] == "implementer":
        implement(brief)
    elif "report what came" in brief:
        reflect(brief, "lie" in sys.argv)
    else:
        think(brief)


if __name__ == "__main__":
    main()
