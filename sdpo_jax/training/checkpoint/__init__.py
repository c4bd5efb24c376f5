"""Checkpoints: their contents, their writing and reading, and the proof that they are intact."""
