"""Alembic migrations of the catalog."""
