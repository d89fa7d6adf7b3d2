"""Compaction of old log segments into runs of the table `compacted`."""
