"""How to score a trained policy, and on which examples."""
