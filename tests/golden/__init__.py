"""Checks against numbers that the reference implementation produced: `python -m tests.golden DIR`."""
