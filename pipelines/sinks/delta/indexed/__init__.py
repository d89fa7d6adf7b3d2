"""Parts of the indexed writer: its key index, deletion vectors and Delta commits; see how-a-row-is-updated.md."""
