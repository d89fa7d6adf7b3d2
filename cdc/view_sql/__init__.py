"""The SQL of views: what it reads, which keys changed rows affect, and how tables are joined."""
