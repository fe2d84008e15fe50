"""Execute emitted assembly on the CPU: PTX and gfx950, with bounds, initialisation and race checks."""
