"""Held-out evaluation, metrics of completions, and alarms for training that goes wrong."""
