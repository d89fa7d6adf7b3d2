"""Access to the Postgres server whose changes are captured; the only package that imports psycopg."""
