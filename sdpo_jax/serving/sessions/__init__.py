"""Interactive sessions: an agent proposes, a person decides, and what was denied is learned."""
