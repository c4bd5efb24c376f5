"""Learning of runs and of the service: batches, losses, gradients, the optimizer step, training slots."""
