"""Rows that a target cannot take, set aside with their keys."""
