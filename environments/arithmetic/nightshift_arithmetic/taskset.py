"""The arithmetic environment as a verifiers v1 taskset."""

from nightshift_gsm8k.taskset import taskset_of

ArithmeticTaskset = taskset_of("nightshift_arithmetic")
