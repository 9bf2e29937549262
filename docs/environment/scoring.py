"""The reward. It must score any text from 0 to 1, quickly and without an exception: the policy may write anything."""

from nightshift_gsm8k.scoring import extract_answer


def score(text: str, answer: str) -> float:
    """Return 1.0 if the last number of the text is the answer, else 0.0."""
    return float(extract_answer(text) == answer)
