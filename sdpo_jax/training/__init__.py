"""State, the jitted step, the loop, checkpoints, evaluation, metrics."""
