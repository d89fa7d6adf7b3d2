"""Statistics of a range that the fold needs in advance, read from narrow columns in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import ROW_OPERATIONS, Operation

STATISTICS_COLUMNS: Final = ("position", "ordinal", "relation", "op", "key", "old_key", "partial", "payload", "address")
"""Log columns that `collect_statistics` reads."""

_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))
_FENCES: Final = pa.array(["t", "g"])
_FENCE_COLUMNS: Final = ["relation", "op", "position", "ordinal", "payload"]
_MOVED: Final = ["relation", "key", "old_key", "position", "ordinal"]


@dataclass(frozen=True, slots=True)
class Fence:
    """The latest truncate and generation end of one relation in a range: earlier rows are removed."""

    position: int = -1
    ordinal: int = -1
    """Of the latest truncate."""
    generation: int = -1
    """Start position of the latest completed full copy."""

    def with_truncate(self, order: tuple[int, int]) -> Fence:
        """The fence after a truncate at (position, ordinal)."""
        return Fence(*max(order, (self.position, self.ordinal)), self.generation)

    def with_generation(self, began: int) -> Fence:
        """The fence after a full copy that began at this position."""
        return Fence(self.position, self.ordinal, max(began, self.generation))

    def hides(self, rows: pa.Table) -> pa.ChunkedArray:
        """Which rows of the relation, with `position` and `ordinal`, are removed."""
        return _is_before(rows, self.position, self.ordinal, self.generation)


@dataclass(frozen=True, slots=True)
class RangeStatistics:
    """Facts about a range that decide how it is folded."""

    partial: bool = False
    """Whether it has partial images; if not, the latest row of a key is its state."""
    moves: bool = False
    """Whether it has key changes with partial images."""
    fences: Mapping[int, Fence] = field(default_factory=dict)
    """By relation; relations without `t` and `g` are absent."""
    links: int | None = None
    """Upper bound of the length of a chain of partial key changes a → b → c; None if not counted."""
    keyless: bool = False
    """Whether it has rows of tables without a key."""


def collect_statistics(tables: Iterable[pa.Table], *, sink: str) -> RangeStatistics:
    """Collect the statistics of a range without Spark: tables have its STATISTICS_COLUMNS, in any order."""
    partial = keyless = False
    fences: dict[int, Fence] = {}
    moved: list[dict[str, Any]] = []
    for table in tables:
        rows = table.filter(addressed_to(table["address"], sink))
        partial = partial or bool(pc.any(rows["partial"]).as_py())
        moved += rows.filter(pc.and_(rows["partial"], pc.is_valid(rows["old_key"]))).select(_MOVED).to_pylist()
        add_fences(fences, fence_rows(rows))
        has_none = pc.and_(pc.is_null(rows["key"]), pc.is_in(rows["op"], _ROWS))
        keyless = keyless or bool(pc.any(has_none).as_py())
    return RangeStatistics(partial, bool(moved), fences, _links(moved), keyless)


def addressed_to(address: pa.ChunkedArray, sink: str) -> pa.ChunkedArray:
    """Which rows are for a sink: those without an address, and those of a backfill for this sink."""
    return pc.or_(pc.is_null(address), pc.fill_null(pc.equal(address, sink), False))


def fence_rows(rows: pa.Table) -> list[dict[str, Any]]:
    """The `t` and `g` rows, as dictionaries."""
    return rows.filter(pc.is_in(rows["op"], _FENCES)).select(_FENCE_COLUMNS).to_pylist()


def add_fences(fences: dict[int, Fence], rows: Iterable[Mapping[str, Any]]) -> None:
    """Add `t` and `g` rows to the fences by relation."""
    for row in rows:
        fence = fences.get(row["relation"], Fence())
        if row["op"] == Operation.TRUNCATE:
            fences[row["relation"]] = fence.with_truncate((row["position"], row["ordinal"]))
        else:
            fences[row["relation"]] = fence.with_generation(int(bytes(row["payload"])))


def is_fenced(rows: pa.Table, fences: Mapping[int, Fence]) -> pa.ChunkedArray:
    """Which rows, with `relation`, `position` and `ordinal`, are removed; one pass over all relations."""
    which = pc.index_in(rows["relation"], pa.array(fences, pa.int64()))
    bounds = (
        pc.take(pa.array([getattr(fence, name) for fence in fences.values()], pa.int64()), which)
        for name in ("position", "ordinal", "generation")
    )
    return pc.fill_null(_is_before(rows, *bounds), False)


def _is_before(rows: pa.Table, position: Any, ordinal: Any, generation: Any) -> pa.ChunkedArray:
    """Which rows precede a truncate or a generation; bounds are scalars, or arrays with one entry per row."""
    at_truncate = pc.and_(pc.equal(rows["position"], position), pc.less(rows["ordinal"], ordinal))
    cleared = pc.or_(pc.less(rows["position"], position), at_truncate)
    return pc.or_(cleared, pc.less(rows["position"], generation))


def _links(moved: list[dict[str, Any]]) -> int:
    """Length of the longest chain of key changes; a change of a key that was itself a new key is one link."""
    depth: dict[tuple[int, tuple[str, ...]], int] = {}
    for row in sorted(moved, key=lambda row: (row["position"], row["ordinal"])):
        before = depth.get((row["relation"], tuple(row["old_key"])), 0)
        depth[row["relation"], tuple(row["key"])] = before + 1
    return max(depth.values(), default=0)
