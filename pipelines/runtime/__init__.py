"""What stands around the sinks of a running apply process."""
