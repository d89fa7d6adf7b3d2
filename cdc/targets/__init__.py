"""Read-only access to derived stores, for the command line, the page and verify."""
