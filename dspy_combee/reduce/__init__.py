"""Shuffle and Reduce: from reflection records to one proposal (paper, sections 3.1 and 3.2)."""
