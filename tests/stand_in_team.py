"""A stand-in for two agents with a language model: `python -c CODE` strategist|implementer, prompt on stdin.

The strategist asks for another learning rate or weight decay, in turn, and writes a lesson of each run. The implementer
writes what the hypothesis says, key by key.
It is given to `python -c`, so that it runs in bubblewrap, where nothing of the checkout can be seen.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

RATES = ("3e-6", "2e-6", "4e-6", "5e-6", "1e-5", "8e-6", "7e-6", "9e-6", "1.2e-5", "6.5e-6")


def think(brief: str) -> None:
    number = int(re.search(r"next experiment, ([0-9]+)", brief)[1])
    key, value = ("lr", RATES[number % len(RATES)]) if number % 2 else ("weight_decay", f"0.0{number + 1}")
    lines = (  # in turn: what is in flight may keep the one
        f"HYPOTHESIS: set trainer.optim.{key} = {value}",
        f"MECHANISM: larger steps, of {len([*Path('logs').iterdir()])} files of logs",
        "PREDICTION: +1.0 pp\nREFUTED BY: a lower score",
        *(f"LESSON {n}: what {n} taught" for n in re.findall(r"^LESSON ([0-9]+)", brief, re.MULTILINE)),
    )
    Path("hypothesis.txt").write_text("\n".join(lines))


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
    else:
        think(brief)


if __name__ == "__main__":
    main()
