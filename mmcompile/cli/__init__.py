"""The command line; ``main`` is the entry point of the ``mmcompile`` script."""

from mmcompile.cli.app import main

__all__ = ["main"]
