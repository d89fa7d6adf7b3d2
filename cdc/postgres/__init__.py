"""Access to the source server; the only package that imports psycopg."""
