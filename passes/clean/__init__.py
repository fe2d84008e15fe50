"""Cleaning: no-ops, duplicates, dead code."""
