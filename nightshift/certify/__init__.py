"""Two configs, trained afresh and compared."""
