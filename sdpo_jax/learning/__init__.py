"""Learning, for runs and for the service: batches, gradients, optimizer steps, scoring, and training slots."""
