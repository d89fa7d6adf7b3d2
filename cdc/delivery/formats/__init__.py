"""Formats of events: what a change looks like on the wire."""
