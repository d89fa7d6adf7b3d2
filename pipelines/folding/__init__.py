"""A range of the log on its way to the rows of a batch: by whom it is folded, and what is kept of the past."""
