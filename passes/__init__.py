"""Passes: graph to graph, listed in order in pipeline.py."""
