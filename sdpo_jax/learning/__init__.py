"""What learns: rows and losses, the optimizer step, and the training slots of a service."""
