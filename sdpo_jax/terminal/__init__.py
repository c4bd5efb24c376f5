"""The terminal program for interactive sessions: it shows proposals, asks for decisions, and runs the tools."""
