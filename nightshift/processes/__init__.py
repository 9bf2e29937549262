"""Processes and GPUs: who owns them, and that none is left."""
