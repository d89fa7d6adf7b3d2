"""Audit of the log: checks that every file and row is as it was written, and that `changes` and `compacted` agree."""
