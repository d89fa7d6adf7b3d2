"""The pure part of verify: canonical text, checksums over buckets of keys, and the row-by-row comparison."""
