"""Fences and statistics: facts about a range of the log that the fold needs first, read from a few small columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.log_row import ROW_OPERATIONS, Operation

STATISTICS_COLUMNS: Final = ("position", "ordinal", "relation", "op", "key", "old_key", "partial", "payload", "address")
"""Log columns that `collect_statistics` reads."""

_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))
_FENCES: Final = pa.array(["t", "g"])
_FENCE_COLUMNS: Final = ["relation", "op", "position", "ordinal", "payload"]
_MOVED: Final = ["relation", "key", "old_key", "position", "ordinal"]


@dataclass(frozen=True, slots=True)
class Fence:
    """The fence of one relation: its latest truncate and its latest finished full copy in a range of the log.

    Rows older than the truncate, or than the start of the copy, are removed.
    """

    position: int = -1
    """Position of the latest truncate; -1 if there is none."""
    ordinal: int = -1
    """Ordinal of the latest truncate; -1 if there is none."""
    generation: int = -1
    """Start position of the latest full copy that ended in the range; -1 if there is none."""

    def with_truncate(self, order: tuple[int, int]) -> Fence:
        """Return a fence that also excludes all rows before a truncate at `order`, a pair (position, ordinal)."""
        return Fence(*max(order, (self.position, self.ordinal)), self.generation)

    def with_generation(self, began: int) -> Fence:
        """Return the fence after the end of a full copy that began at the given position."""
        return Fence(self.position, self.ordinal, max(began, self.generation))

    def hides(self, rows: pa.Table) -> pa.ChunkedArray:
        """Return one bool per row: whether the truncate or the full copy removes the row.

        rows: rows of the fence's relation, with the columns `position` and `ordinal`.
        """
        return _is_before(rows, self.position, self.ordinal, self.generation)


@dataclass(frozen=True, slots=True)
class RangeStatistics:
    """Facts about a range of the log that decide how it is folded."""

    partial: bool = False
    """Whether the range has partial images; if not, the latest row of a key is its state."""
    moves: bool = False
    """Whether the range has partial images that change the key of their row."""
    fences: Mapping[int, Fence] = field(default_factory=dict)
    """Relation → its fence, for each relation with a truncate or a finished full copy in the range."""
    links: int | None = None
    """Maximum number of times that partial images changed the key of one row, as in a → b → c; None if not counted."""
    keyless: bool = False
    """Whether the range has rows of tables without a key."""


def collect_statistics(tables: Iterable[pa.Table], *, sink: str) -> RangeStatistics:
    """Return the statistics of a range, computed without Spark.

    tables: the log rows of the range in any order, with the columns STATISTICS_COLUMNS. sink: the name of the sink;
    rows addressed to other sinks are ignored.
    """
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
    """Return, as one bool per row, whether the row is for this sink: it has no address, or the sink's address."""
    return pc.or_(pc.is_null(address), pc.fill_null(pc.equal(address, sink), False))


def fence_rows(rows: pa.Table) -> list[dict[str, Any]]:
    """Return the truncates (`t`) and ends of full copies (`g`) among log rows, as dictionaries."""
    return rows.filter(pc.is_in(rows["op"], _FENCES)).select(_FENCE_COLUMNS).to_pylist()


def add_fences(fences: dict[int, Fence], rows: Iterable[Mapping[str, Any]]) -> None:
    """Update the fences of relations with the given truncates (`t`) and ends of full copies (`g`).

    fences: relation → fence; changed in place.
    """
    for row in rows:
        fence = fences.get(row["relation"], Fence())
        if row["op"] == Operation.TRUNCATE:
            fences[row["relation"]] = fence.with_truncate((row["position"], row["ordinal"]))
        else:
            fences[row["relation"]] = fence.with_generation(int(bytes(row["payload"])))


def is_fenced(rows: pa.Table, fences: Mapping[int, Fence]) -> pa.ChunkedArray:
    """Return one bool per row: whether the fence of the row's relation removes the row.

    rows: rows with the columns `relation`, `position` and `ordinal`.
    """
    which = pc.index_in(rows["relation"], pa.array(fences, pa.int64()))
    bounds = (
        pc.take(pa.array([getattr(fence, name) for fence in fences.values()], pa.int64()), which)
        for name in ("position", "ordinal", "generation")
    )
    return pc.fill_null(_is_before(rows, *bounds), False)


def _is_before(rows: pa.Table, position: Any, ordinal: Any, generation: Any) -> pa.ChunkedArray:
    """Return one bool per row: whether it precedes a truncate, or the start of a full copy.

    position, ordinal: of the truncate. generation: start of the copy. Each is a scalar or has one entry per row.
    """
    at_truncate = pc.and_(pc.equal(rows["position"], position), pc.less(rows["ordinal"], ordinal))
    cleared = pc.or_(pc.less(rows["position"], position), at_truncate)
    return pc.or_(cleared, pc.less(rows["position"], generation))


def _links(moved: list[dict[str, Any]]) -> int:
    """Return the highest number of times that one row changed its key; moved: the partial images that change a key."""
    depth: dict[tuple[int, tuple[str, ...]], int] = {}
    for row in sorted(moved, key=lambda row: (row["position"], row["ordinal"])):
        before = depth.get((row["relation"], tuple(row["old_key"])), 0)
        depth[row["relation"], tuple(row["key"])] = before + 1
    return max(depth.values(), default=0)
