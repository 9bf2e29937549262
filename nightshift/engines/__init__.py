"""How to train: what every engine offers, and the two that exist."""
