"""Training runs: session, step, loop, checkpoints, metrics and the run directory."""
