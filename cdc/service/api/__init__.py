"""The REST API of the server process."""
