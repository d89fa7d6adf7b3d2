"""Spark jobs that apply the change log to derived stores."""
