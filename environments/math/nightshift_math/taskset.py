"""MATH as a verifiers v1 taskset."""

from nightshift_gsm8k.taskset import ChatHarness, WordProblemConfig, taskset_of

from nightshift_math import data, scoring

__all__ = ["ChatHarness", "MathTaskset"]


class MathConfig(WordProblemConfig):
    """Which problems. `levels`: as in rules.toml."""

    levels: tuple[int, ...] = data.LEVELS


MathTaskset = taskset_of(data, scoring, MathConfig)
