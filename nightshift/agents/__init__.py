"""The proposers of the next train.toml (coding agents, teams, searches), their sandbox and their brief."""
