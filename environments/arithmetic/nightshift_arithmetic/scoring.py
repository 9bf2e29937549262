"""The scoring of gsm8k: both environments request the same format of answers."""

from nightshift_gsm8k.scoring import extract_answer, is_formatted, score

__all__ = ["extract_answer", "is_formatted", "score"]
