"""The demo: an embedded Postgres with a shop database, a live workload, the whole pipeline, and a verification."""
