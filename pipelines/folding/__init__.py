"""Folding: from a range of log rows to the latest state of every key, or to every change of a table."""
