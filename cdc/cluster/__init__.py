"""Descriptions of a Spark job for a cluster: command line of spark-submit, Kubernetes manifest, Databricks bundle."""
