"""Checks of a run before anything is compiled (memory, prompts, graders, odd settings), and starter folders."""
