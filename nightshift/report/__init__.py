"""The morning page, and what leaves the checkout in other formats."""
