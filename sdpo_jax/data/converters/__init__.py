"""Public data sets in the reference's raw schema, one module per family of sources."""
