"""The capture process: from the replication stream to durable commits of the change log."""
