"""What pays: any text is scored 0..1, without an exception and quickly, for the policy writes what it likes."""

from nightshift_gsm8k.scoring import extract_answer


def score(text: str, answer: str) -> float:
    """1.0 if the last number of the text is the answer, else 0.0."""
    return float(extract_answer(text) == answer)
