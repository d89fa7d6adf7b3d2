"""Postgres types to Arrow types, one file per family; the complete map is in README.md."""

from __future__ import annotations

from typing import Final

from cdc.table import Column
from pipelines.types import boolean, bytea, datetime, floating, integer
from pipelines.types.family import Family, TypePolicy
from pipelines.types.numeric import NUMERIC_OID, numeric_family
from pipelines.types.text import TEXT

__all__ = ["EXACT_BY_OID", "Family", "TypePolicy", "family_of"]

EXACT_BY_OID: Final[dict[int, Family]] = {
    **boolean.BY_OID,
    **integer.BY_OID,
    **floating.BY_OID,
    **datetime.BY_OID,
    **bytea.BY_OID,
}
"""Families that the type OID alone chooses (pg_type.dat); numeric also needs its modifier."""


def family_of(column: Column, policy: TypePolicy) -> Family:
    """The family of a column's values under a policy, looked through domains."""
    if policy is TypePolicy.TEXT:
        return TEXT
    oid, typmod = column.value_type
    if oid == NUMERIC_OID:
        return numeric_family(typmod) or TEXT
    return EXACT_BY_OID.get(oid, TEXT)
