"""Pushed: what Spark's own filters say of positions, relations and topics; Spark applies the filters all the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from cdc.log.ranges import TableSelection
from cdc.position import Position
from cdc.table import exact_glob, matches
from cdc.target_names import POSITION_COLUMN

_END: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedFilters:
    """Bounds of the rows that pass the filters, each included."""

    positions: tuple[int, int] = (0, _END)
    relations: tuple[int, int] = (0, _END)
    topics: frozenset[str] | None = None
    """None for any."""

    @classmethod
    def of(cls, filters: Iterable[Filter]) -> Self:
        """What all of the filters together leave; one that says nothing of these columns leaves everything."""
        pushed = cls()
        for one in filters:
            name = getattr(one, "attribute", ("",))[0]
            if name in ("position", POSITION_COLUMN):
                pushed = replace(pushed, positions=_both(pushed.positions, _bounds(one)))
            elif name == "relation":
                pushed = replace(pushed, relations=_both(pushed.relations, _bounds(one)))
            elif name == "topic" and isinstance(one, EqualTo | In):
                named = frozenset(_values(one))
                pushed = replace(pushed, topics=named if pushed.topics is None else named & pushed.topics)
        return pushed

    def within(self, after: Position, upto: Position) -> tuple[Position, Position]:
        """The part of (after, upto] that passes, as such a range."""
        low, high = max(after, self.positions[0] - 1), min(upto, self.positions[1])
        return Position(min(low, upto)), Position(max(high, 0))

    def narrowed(self, only: TableSelection) -> TableSelection | None:
        """What passes of the rows that a frame is of; None if nothing does."""
        relations = self.relations if only.relations is None else _both(self.relations, only.relations)
        if relations[0] > relations[1]:
            return None
        if relations != (0, _END):
            only = replace(only, relations=relations)
        if self.topics is None:
            return only
        named = [topic for topic in self.topics if not only.globs or matches(topic, only.globs)]
        return replace(only, globs=tuple(map(exact_glob, sorted(named)))) if named else None


def _both(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])


def _bounds(one: Any) -> tuple[int, int]:
    low, high = 0, _END
    if isinstance(one, EqualTo | In):
        values = _values(one)
        low, high = min(values, default=_END), max(values, default=-1)
    elif isinstance(one, GreaterThan | GreaterThanOrEqual):
        low = one.value + isinstance(one, GreaterThan)
    elif isinstance(one, LessThan | LessThanOrEqual):
        high = one.value - isinstance(one, LessThan)
    return low, high


def _values(one: Any) -> list[Any]:
    """What an equality allows; a null equals nothing."""
    return [value for value in ([one.value] if isinstance(one, EqualTo) else one.value) if value is not None]
