"""Commands: flags in, printed text and exit codes out."""
