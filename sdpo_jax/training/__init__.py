"""One run: its session, step, update, loop, checkpoints and metrics."""
