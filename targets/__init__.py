"""Targets: one file per target (facts and kernel list); modules with a leading underscore are shared machinery."""
