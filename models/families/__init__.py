"""One declaration per model_type: how its config.json is read and written, and its parameter table."""
