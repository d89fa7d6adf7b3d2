"""Snapshots: existing rows on their way into the log."""
