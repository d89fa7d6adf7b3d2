"""The seam to Postgres: the only package that imports psycopg."""
