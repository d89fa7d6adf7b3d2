"""Views: streams that SQL derives from the tables of a Delta sink, as changes in the log of views."""
