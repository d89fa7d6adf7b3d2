"""A target made anew from the log alone."""
