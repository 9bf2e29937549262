"""The two files that people and agents write, train.toml and rules.toml, and what may be in them."""
