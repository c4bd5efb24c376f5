"""Interactive sessions: an agent proposes, a person decides, and the adapter learns from corrections."""
