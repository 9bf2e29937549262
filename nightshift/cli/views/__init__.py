"""What commands print as JSON."""
