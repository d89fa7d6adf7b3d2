"""Replay: rebuilds the target of a sink from the change log alone."""
