"""The directory of a run: which process may write to it, its contents, and the detection of lost files."""
