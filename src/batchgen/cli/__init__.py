"""Commands: wiring and exit codes only."""
