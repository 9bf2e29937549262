"""prime-rl on two GPUs."""
