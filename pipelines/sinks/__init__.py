"""Sinks: one contract (sink.py), one file or family of files per engine, none importing another."""
