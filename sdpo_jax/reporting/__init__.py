"""HTML reports, made only from the files of runs."""
