"""The web page: rendered on the server, kept current over server-sent events."""
