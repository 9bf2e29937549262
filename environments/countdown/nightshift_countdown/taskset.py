"""The countdown environment as a verifiers v1 taskset."""

from nightshift_gsm8k.taskset import taskset_of

CountdownTaskset = taskset_of("nightshift_countdown")
