"""Number formats: one module owns each format."""
