"""Search server: how rows are stored in OpenSearch and Elasticsearch, and how they are read from there."""
