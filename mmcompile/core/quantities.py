"""Numbers for people: bytes and counts in decimal units."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """ "512 B", "1.5 KB", "98.2 MB"."""
    return f"{count:.0f} B" if count < 1000 else _scale(count, ("KB", "MB", "GB", "TB"))


def format_count(count: float) -> str:
    """ "512", "98.6 K", "134.5 M"."""
    return f"{count:.0f}" if count < 1000 else _scale(count, ("K", "M", "G", "T"))


def _scale(count: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        count /= 1000
        # What rounds to 1000.0 belongs to the next unit.
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} {units[-1]}"
