"""The overnight loop: start, state, summary and notifications."""
