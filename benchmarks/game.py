"""What playing costs and how exact a rating is: tic-tac-toe with models/tictactoe-base as it is, and turns as
long as those of Connect Four would be.

    uv run benchmarks/game.py --results results/game.json     # seconds of one thread's CPU, about a minute
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from machine import RESULTS, machine, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer

from nightshift.config.rules import EnvironmentRules
from nightshift.engines.trl.sampler import Sample, sample
from nightshift.engines.trl.selfplay import play
from nightshift.evaluation import environment

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "tictactoe-base"
NUM_OPENINGS, NUM_AT_ONCE = 100, 250
CONNECT_FOUR = " ".join("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP")  # 42 cells
LENGTHS = (20, 375, 750, 1575)  # tokens before a turn: a board of tic-tac-toe, about 5, 9 and 20 of Connect Four


def say(policy: Any, end: int, prompts: list[list[int]]) -> list[Sample]:
    """Greedy answers."""
    found: list[Sample] = []
    for start in range(0, len(prompts), NUM_AT_ONCE):
        found += sample(policy, prompts[start : start + NUM_AT_ONCE], 1, 8, 0.0, {end})
    return found


def ratings_of_sets(policy: Any, tokenizer: Any) -> list[dict[str, float]]:
    """Elo by several sets of training openings, with what it claims to be its standard error; CPU seconds."""
    (game,) = environment.load(ROOT, [EnvironmentRules("tictactoe", NUM_OPENINGS, needs=("gsm8k",), is_game=True)])
    assert isinstance(game, environment.Game)
    openings, found = game.examples("train"), []
    for start in range(0, len(openings) - NUM_OPENINGS + 1, NUM_OPENINGS):
        began = time.process_time()
        games = [game.episodes(example) for example in openings[start : start + NUM_OPENINGS]]
        answer = partial(say, policy, tokenizer.eos_token_id)
        play([one for each in games for one in each], tokenizer, answer, answer, 2048)  # type: ignore[misc]
        seconds = time.process_time() - began
        figures = game.module("ratings").figures(games)
        found.append({"elo": figures["elo"], "elo_stderr": figures["elo_stderr"], "seconds": seconds})
    return found


def turn_seconds(policy: Any, length: int) -> float:
    """CPU seconds of one turn of one game, of 64 at once."""
    began = time.process_time()
    sample(policy, [[5] * length] * 64, 1, 2, 1.0, {1})
    return (time.process_time() - began) / 64


@click.command()
@click.option("--results", type=Path, required=True)
def main(results: Path) -> None:
    """Measure, print, write."""
    kind = machine()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval()
    sets = ratings_of_sets(policy, tokenizer)
    figures = {
        "num_games": 10 * NUM_OPENINGS,
        "seconds_a_set": statistics.median(one["seconds"] for one in sets),
        "elo_sd_over_sets": statistics.stdev(one["elo"] for one in sets),
        "elo_stderr_mean": statistics.mean(one["elo_stderr"] for one in sets),
        "tokens_of_a_board": {name: len(tokenizer(f"Question: {text}\nAnswer: ")["input_ids"])
                              for name, text in (("tic-tac-toe", "a b c d e f g h i"), ("connect four", CONNECT_FOUR))},
        "turn_milliseconds": {str(length): 1000 * turn_seconds(policy, length) for length in LENGTHS},
        "sets": sets,
    }  # fmt: skip
    command = f"uv run benchmarks/game.py {' '.join(sys.argv[1:])}"
    write_result(RESULTS / results.name, command, figures, kind)
    click.echo({name: value for name, value in figures.items() if name != "sets"})


if __name__ == "__main__":
    main()
