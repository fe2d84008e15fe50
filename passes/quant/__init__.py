"""Quantization schemes, one file each."""
