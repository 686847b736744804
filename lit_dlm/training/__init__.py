"""What all training shares: states, rows of a forward, checkpoints, sharded weights."""
