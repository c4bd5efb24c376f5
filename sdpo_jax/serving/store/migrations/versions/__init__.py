"""Revisions of the tables, each with the number of the one that it follows."""
