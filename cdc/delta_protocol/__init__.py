"""The log of a Delta table, by the Delta protocol: commits, checkpoints, deletion vectors, and what they add up to."""
