"""Family: how one group of Postgres types becomes Arrow; and the policies that choose it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa


class TypePolicy(StrEnum):
    """What a sink does with the text that Postgres sent."""

    #: The nearest type that holds every value exactly; a value outside of it is an error, never changed.
    EXACT = "exact"
    #: Every column is a string, exactly as sent.
    TEXT = "text"

    def of(self, column: str) -> TypePolicy:
        """The policy of one column, by its name at the source: the same for all."""
        del column
        return self


@dataclass(frozen=True, slots=True)
class ColumnPolicies:
    """A policy for a table, and other ones for some of its columns; pickled to executors."""

    table: TypePolicy
    columns: tuple[tuple[str, TypePolicy], ...] = ()
    """(name at the source, policy)."""

    def of(self, column: str) -> TypePolicy:
        """The policy of one column, by its name at the source."""
        return dict(self.columns).get(column, self.table)


Policy = TypePolicy | ColumnPolicies
"""What says for every column of a table which family it gets."""


@dataclass(frozen=True, slots=True)
class Family:
    """One target type and its conversion.

    `convert` takes an array of strings (Postgres text under the pinned session settings, null for
    SQL NULL) and returns an array of `arrow` of the same length with nulls at the same places.
    It raises pyarrow.ArrowInvalid when any value cannot be held exactly.
    """

    name: str
    arrow: pa.DataType
    convert: Callable[[pa.Array], pa.Array]


def cast_family(name: str, arrow: pa.DataType) -> Family:
    """A family whose text Arrow's own strict cast reads exactly."""
    return Family(name, arrow, lambda texts: texts.cast(arrow))
