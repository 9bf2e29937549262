"""Somebody's verifiers v1 taskset in Nightshift's hands. It imports nothing of Nightshift: prime-rl loads it, too."""
