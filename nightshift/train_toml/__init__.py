"""The one file that an agent edits: its keys, its text, its checks."""
