"""The shipped configurations, one file per experiment."""
