"""What is known of a campaign: records, journal, git, scores, and the rule that decides."""
