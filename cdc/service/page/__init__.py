"""The web page, which the server renders and updates over server-sent events."""
