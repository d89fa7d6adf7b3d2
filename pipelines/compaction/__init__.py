"""Cold segments of the log on their way into its compacted table."""
