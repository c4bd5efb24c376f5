"""Tools of an agent: files of one folder and commands in it, which can change nothing else on the machine."""
