"""The overnight loop: its start, its state, its summary, its notifications."""
