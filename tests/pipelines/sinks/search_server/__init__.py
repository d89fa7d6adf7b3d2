"""Tests of the sink on a search server, against a real node."""
