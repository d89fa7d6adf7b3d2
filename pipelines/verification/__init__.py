"""Verification: compares the targets of a pipeline with the source or with the change log, and repairs mismatches."""
