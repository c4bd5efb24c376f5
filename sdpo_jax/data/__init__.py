"""Questions: rows, sources, chat-templated prompts and the Grain pipeline."""
