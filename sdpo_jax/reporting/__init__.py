"""HTML reports and model cards, made only from the files of runs."""
