"""Number formats: one module owns each format."""

WEIGHT_FORMATS = ("nvfp4", "mxfp8")
