"""TRL's GRPO in one child process, on a CPU or one GPU."""
