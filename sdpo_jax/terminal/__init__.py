"""The terminal program of interactive sessions: shows what a model proposes, asks, runs the tools, says what was
learned.
"""
