"""Learning from collected traces instead of rollouts: batches of them, and the runs over them."""
