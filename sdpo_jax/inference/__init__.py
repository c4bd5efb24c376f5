"""Uses of a run or a model directory: open, evaluate, export, generate, chat, probe."""
