"""The run directory: which process may write to it, its files, and the detection of lost ones."""
