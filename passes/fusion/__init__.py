"""Fusions: rule files (RULES) are found by themselves, largest pattern first."""
