"""The last steps before lowering: constants folded and arranged."""
