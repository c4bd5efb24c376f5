"""What the student says: sampling from logits, the jitted decode loop, and the batching engine around it."""
