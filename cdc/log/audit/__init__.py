"""Proof that the log is what was written: every file, every row, both tables against each other."""
