"""The teacher: its parameters, its context and its signal, and the order of a generation batch."""
