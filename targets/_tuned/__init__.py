"""Kernels tuned for one family of targets; offered before the portable ones, left out by --portable."""
