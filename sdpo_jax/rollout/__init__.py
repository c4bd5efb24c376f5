"""Rollouts of the student: the sampler with its slots, queue and decode loop, and grading during sampling."""
