"""Who proposes the next train.toml."""
