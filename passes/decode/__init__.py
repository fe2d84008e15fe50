"""Fusions that pay only when every sequence brings one token."""
