"""What a Spark cluster is told to run for a definition: a command, a manifest of Kubernetes, a bundle of Databricks."""
