"""Tests of the way rows are stored in a search server."""
