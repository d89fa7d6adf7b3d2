"""Postgres types to Arrow types, one file per family; the complete map is in README.md."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from cdc.table import Column
from pipelines.types import boolean, bytea, datetime, floating, integer
from pipelines.types.array import BOXES, ELEMENT_BY_OID, TEXT_ARRAYS, array_family
from pipelines.types.family import ColumnPolicies, Family, Policy, TypePolicy
from pipelines.types.numeric import NUMERIC_OID, modifier, numeric_family
from pipelines.types.text import TEXT, TEXT_ARRAY_OID, TEXT_OID

__all__ = ["EXACT_BY_OID", "ColumnPolicies", "Family", "Policy", "TypePolicy", "declared_as", "family_of"]

EXACT_BY_OID: Final[dict[int, Family]] = {
    **boolean.BY_OID,
    **integer.BY_OID,
    **floating.BY_OID,
    **datetime.BY_OID,
    **bytea.BY_OID,
}
"""Families that the type OID alone chooses (pg_type.dat); numeric also needs its modifier."""
_NO_ARRAYS: Final = frozenset({BOXES, NUMERIC_OID, TEXT_OID, *EXACT_BY_OID})
_OID_OF: Final = {family.arrow: oid for oid, family in reversed(EXACT_BY_OID.items())} | {TEXT.arrow: TEXT_OID}
_ARRAY_OF: Final = {element: oid for oid, element in ELEMENT_BY_OID.items()} | {TEXT_OID: TEXT_ARRAY_OID}


def family_of(column: Column, policy: Policy) -> Family:
    """The family of a column's values under a policy, looked through domains."""
    if policy.of(column.name) is TypePolicy.TEXT:
        return TEXT
    oid, typmod = column.value_type
    element = _element_of(column, oid, typmod)
    # in a key an array stays text: not every engine joins lists
    return _scalar(oid, typmod) if element is None or column.key is not None else array_family(element)


def declared_as(arrow: pa.DataType) -> tuple[int, int]:
    """(type OID, modifier) of a column whose family under EXACT is of this type."""
    if pa.types.is_list(arrow):
        oid, typmod = declared_as(arrow.value_type)
        return _ARRAY_OF[oid], typmod
    if pa.types.is_decimal(arrow):
        return NUMERIC_OID, modifier(arrow.precision, arrow.scale)
    return _OID_OF[arrow], -1


def _scalar(oid: int, typmod: int) -> Family:
    if oid == NUMERIC_OID:
        return numeric_family(typmod) or TEXT
    return EXACT_BY_OID.get(oid, TEXT)


def _element_of(column: Column, oid: int, typmod: int) -> Family | None:
    """The family of an array's elements, None for what is no array."""
    if oid in ELEMENT_BY_OID:
        return _scalar(ELEMENT_BY_OID[oid], typmod)
    if oid in TEXT_ARRAYS:
        return TEXT
    # format_type ends the name of an array type so, and quotes a name that has brackets of its own
    named = column.type_name.endswith("[]") and oid not in _NO_ARRAYS
    return TEXT if named else None
