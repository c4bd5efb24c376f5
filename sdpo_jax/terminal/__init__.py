"""The terminal program of interactive sessions: shows the model's proposals, asks about them, and runs the tools."""
