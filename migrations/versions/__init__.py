"""Revisions of the catalog, oldest first by number."""
