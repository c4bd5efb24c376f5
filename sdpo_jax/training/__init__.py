"""One run: its session, the step, the update, the loop, checkpoints, metrics."""
