"""Index, deletion vectors and commits of the indexed writer; see how-a-row-is-updated.md."""
