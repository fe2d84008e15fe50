"""One spelling for each meaning: mm:: operations, token-major, paged cache."""
