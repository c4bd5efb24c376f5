"""Pages from the files of a run, and from nothing else."""
