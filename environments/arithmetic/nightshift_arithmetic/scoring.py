"""The scoring of gsm8k: answers are written in the same format."""

from nightshift_gsm8k.scoring import extract_answer, score

__all__ = ["extract_answer", "score"]
