"""Sinks: one contract (contract.py), and one package per engine (delta, search). No engine imports another."""
