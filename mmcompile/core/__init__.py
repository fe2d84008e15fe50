"""Core: errors, number formats, mm:: operations, graph and rewrite machinery, plan records, target facts."""
