"""Search server sink: writes tables into OpenSearch or Elasticsearch, one index per table."""
