"""Checkpoints: what is saved, how it is written and read back, and how anyone knows that it is as it was."""
