"""The countdown environment as a verifiers v1 taskset."""

from nightshift_gsm8k.taskset import ChatHarness, WordProblemConfig, taskset_of

from nightshift_countdown import data, scoring

__all__ = ["ChatHarness", "CountdownTaskset"]

CountdownTaskset = taskset_of(data, scoring, WordProblemConfig)
