"""Instruction-level helpers with one name and several versions; each target's emitter picks by feature."""
