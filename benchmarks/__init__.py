"""Speed and memory, each beside a baseline measured in the same run; one JSON line a program."""
