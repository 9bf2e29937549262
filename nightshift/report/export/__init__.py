"""Formats of other programs, and a kept model with its card."""
