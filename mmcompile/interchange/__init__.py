"""Interchange: graphs as they go out, in formats that other programs read."""
