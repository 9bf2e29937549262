"""The scoring of gsm8k: answers are written in the same format."""

from nightshift_gsm8k.scoring import extract_answer, is_formatted, score

__all__ = ["extract_answer", "is_formatted", "score"]
