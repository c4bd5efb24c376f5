"""What the student says: the sampler with its slots, queue and decode loop, and grading while it samples."""
