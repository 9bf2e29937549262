"""Who proposes the next train.toml: coding agents, teams, searches; their sandbox and what they are told."""
