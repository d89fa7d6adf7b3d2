"""The connector process: from the replication stream to durable commits of the change log."""
