"""Nightshift: autonomous research for LLM RL post-training."""
