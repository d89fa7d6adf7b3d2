"""Decoding of pgoutput: from the bytes of a replication stream to rows of the log, without I/O and without a clock."""
