"""MATH as a verifiers v1 taskset."""

from nightshift_gsm8k.taskset import WordProblemConfig, taskset_of

from nightshift_math import data


class MathConfig(WordProblemConfig):
    """Which problems. `levels`: as in rules.toml."""

    levels: tuple[int, ...] = data.LEVELS


MathTaskset = taskset_of("nightshift_math", MathConfig)
