"""What can be done with a run or a model directory: open, evaluate, export, generate, chat, probe."""
