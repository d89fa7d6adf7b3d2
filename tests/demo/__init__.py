"""Tests of cdc.demo."""
