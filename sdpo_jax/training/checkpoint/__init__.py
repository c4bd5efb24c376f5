"""Checkpoints of a run: contents, writing, reading and verification."""
