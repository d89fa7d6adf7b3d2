"""The Delta sink: one Delta table per source table, and one published record beside them."""
