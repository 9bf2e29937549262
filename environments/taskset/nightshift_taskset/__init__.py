"""Verifiers tasksets of other authors. It imports nothing of Nightshift, because prime-rl imports it, too."""
