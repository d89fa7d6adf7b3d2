"""pgoutput: from the bytes of a replication stream to rows of the log, without I/O or clock."""
