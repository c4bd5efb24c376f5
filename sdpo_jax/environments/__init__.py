"""Tasks: graders turn completions into scores and feedback, generators make endless questions."""
