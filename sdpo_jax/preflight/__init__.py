"""What can be known of a run before anything is compiled: memory, prompts, graders, settings that look odd."""
