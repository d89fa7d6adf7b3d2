"""The supervisor that runs a pipeline, and the status, API and page that show it."""
