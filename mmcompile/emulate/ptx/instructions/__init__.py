"""What every instruction means: one file for each part of the PTX ISA, one table."""
