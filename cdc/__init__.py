"""Change data capture for Postgres: the connector service."""
