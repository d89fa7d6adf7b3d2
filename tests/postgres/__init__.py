"""Tests of the seam to Postgres, against real servers."""
