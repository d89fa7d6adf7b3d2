"""Tests of cdc.pgoutput."""
