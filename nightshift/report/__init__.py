"""The morning page, and exports to other formats."""
