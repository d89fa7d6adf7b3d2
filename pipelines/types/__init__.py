"""Postgres types to Arrow types; README.md has the complete table."""
