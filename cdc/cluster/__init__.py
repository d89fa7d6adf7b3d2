"""A Spark job for a cluster, as a command line of spark-submit, a Kubernetes manifest or a Databricks bundle."""
