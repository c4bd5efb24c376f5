"""Where a run lives: the device mesh, the processes that share it, what they exchange, and the chips they have."""
