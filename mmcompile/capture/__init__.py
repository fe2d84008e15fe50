"""Capture: models, checkpoints and graphs as they come in."""
