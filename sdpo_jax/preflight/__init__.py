"""Checks of a run before anything is compiled: memory, prompts, graders, and settings that look odd."""
