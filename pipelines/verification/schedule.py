"""Passes: which range of a table is to be compared next, by what the catalog keeps of those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import pyarrow as pa

from cdc.catalog import VerifiedRange
from cdc.postgres.key_ranges import is_ordered_by_bytes
from cdc.table import TableSchema

_INTEGERS: Final = {20, 21, 23}
_UUID: Final = 2950
_TEXTS: Final = {25, 1043}


@dataclass(frozen=True, slots=True)
class PassStart:
    """Where a pass over a table stands: its next range."""

    began: datetime
    number: int = 0
    first: str | None = None
    """None: the range is the first one."""


def next_place(passes: Sequence[Sequence[VerifiedRange]], now: datetime, every: float) -> PassStart | None:
    """The next range of the pass on its way, or of a new one if that is due; else None. passes: newest first."""
    if not passes:
        return PassStart(now)
    newest = passes[0]
    if newest[-1].ended is not None:
        return PassStart(newest[0].began, newest[-1].number + 1, newest[-1].ended)
    return PassStart(now) if newest[0].began + timedelta(seconds=every) <= now else None


def in_same_order(source: Any, schema: TableSchema, kind: pa.DataType) -> bool:
    """Whether the source's index has the key's first column in the order that a target's column of that kind has."""
    column = schema.key[0]
    type_oid = column.value_type[0]
    if pa.types.is_integer(kind):
        return type_oid in _INTEGERS
    if not (pa.types.is_string(kind) or pa.types.is_string_view(kind) or pa.types.is_large_string(kind)):
        return False
    return type_oid == _UUID or (type_oid in _TEXTS and is_ordered_by_bytes(source, schema, column.name))
