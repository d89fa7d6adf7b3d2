"""Conversion of Postgres types to Arrow types; README.md has the complete table."""

from __future__ import annotations

from pipelines.types.families import ColumnPolicies, Policy, TypePolicy, declared_as, family_of

__all__ = ["ColumnPolicies", "Policy", "TypePolicy", "declared_as", "family_of"]
