"""Snapshots: copies of existing rows into the change log, while the stream runs."""
