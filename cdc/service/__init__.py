"""What runs and shows a pipeline: supervisor, API, page."""
