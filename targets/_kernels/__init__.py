"""Tile functions and the templates that turn an operation of a plan into an emitted kernel."""
