"""Map: from a program and examples to rollouts and reflection records (paper, section 3.1)."""
