"""A campaign, or its model, for other programs."""
