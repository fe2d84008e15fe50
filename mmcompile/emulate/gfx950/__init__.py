"""gfx950 (CDNA4, wave64): an interpreter of assembly text as LLVM prints it."""
