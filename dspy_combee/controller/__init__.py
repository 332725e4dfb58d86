"""How many examples a step takes, and what is left to spend (paper, section 3.3)."""
