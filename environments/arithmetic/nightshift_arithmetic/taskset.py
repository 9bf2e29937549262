"""The arithmetic environment as a verifiers v1 taskset."""

from nightshift_gsm8k.taskset import ChatHarness, WordProblemConfig, taskset_of

from nightshift_arithmetic import data, scoring

__all__ = ["ArithmeticTaskset", "ChatHarness"]

ArithmeticTaskset = taskset_of(data, scoring, WordProblemConfig)
