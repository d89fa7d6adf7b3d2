"""Audit of the log's files: every file and row is as it was written, and the two tables agree with each other."""
