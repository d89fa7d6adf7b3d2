"""Revisions of the catalog's tables; the number in a file's name gives the order."""
