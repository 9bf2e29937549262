"""Boards of tic-tac-toe as the game's own code has them, out of what players are asked."""


def read(text: str) -> str:
    """The nine characters behind `You are X: Xa b Oc ...`, `Line of X: ...` or the words alone."""
    return "".join(word[0] for word in text.rpartition(":")[2].split())
