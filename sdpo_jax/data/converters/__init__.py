"""Public data sets in the reference's raw schema, one module a family of sources."""
