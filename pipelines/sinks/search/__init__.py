"""The search sink: one index per sink, one commit per batch."""
