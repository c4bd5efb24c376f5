"""Benchmarks of speed and memory, each beside a baseline measured in the same run; one JSON line per program."""
