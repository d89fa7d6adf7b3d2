"""The demo: an embedded Postgres with a shop in it, a live workload, the whole pipeline, and its verification."""
