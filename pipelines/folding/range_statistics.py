"""Survey: what must be known of a range before it is folded, read from narrow columns in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import ROW_OPERATIONS, Operation

SURVEY_COLUMNS: Final = ("position", "ordinal", "relation", "op", "key", "old_key", "partial", "payload", "address")
"""What survey() needs of a range."""

_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))
_FENCES: Final = pa.array(["t", "g"])
_MARK: Final = ["relation", "op", "position", "ordinal", "payload"]
_MOVED: Final = ["relation", "key", "old_key", "position", "ordinal"]


@dataclass(frozen=True, slots=True)
class Fence:
    """What the control rows of a range say of one relation: everything before is gone."""

    position: int = -1
    ordinal: int = -1
    """Of the latest truncate."""
    generation: int = -1
    """Where the latest completed full copy began."""

    def cleared(self, place: tuple[int, int]) -> Fence:
        """The fence after a truncate at place."""
        return Fence(*max(place, (self.position, self.ordinal)), self.generation)

    def regenerated(self, began: int) -> Fence:
        """The fence after a full copy that began at a position."""
        return Fence(self.position, self.ordinal, max(began, self.generation))

    def hides(self, rows: pa.Table) -> pa.ChunkedArray:
        """Which rows of the relation, with `position` and `ordinal`, are gone."""
        return _ended(rows, self.position, self.ordinal, self.generation)


@dataclass(frozen=True, slots=True)
class RangeStatistics:
    """What decides how much work a fold is."""

    partial: bool = False
    """It has partial images; otherwise the latest row of a key is the key's state."""
    moves: bool = False
    """It has partial images that came from another key."""
    fences: Mapping[int, Fence] = field(default_factory=dict)
    """By relation; relations without `t` and `g` are absent."""
    links: int | None = None
    """Of the longest chain of partial moves a → b → c, or more; None if that was not counted."""
    keyless: bool = False
    """It has rows of tables without a key."""


def survey(tables: Iterable[pa.Table], *, sink: str) -> RangeStatistics:
    """Survey a range without Spark: tables hold its SURVEY_COLUMNS, in any order."""
    partial = keyless = False
    fences: dict[int, Fence] = {}
    moved: list[dict[str, Any]] = []
    for every in tables:
        rows = every.filter(addressed_to(every["address"], sink))
        partial = partial or bool(pc.any(rows["partial"]).as_py())
        moved += rows.filter(pc.and_(rows["partial"], pc.is_valid(rows["old_key"]))).select(_MOVED).to_pylist()
        add_fences(fences, marks(rows))
        has_none = pc.and_(pc.is_null(rows["key"]), pc.is_in(rows["op"], _ROWS))
        keyless = keyless or bool(pc.any(has_none).as_py())
    return RangeStatistics(partial, bool(moved), fences, _links(moved), keyless)


def addressed_to(address: pa.ChunkedArray, sink: str) -> pa.ChunkedArray:
    """Which rows are meant for a sink: those for everyone, and those of a backfill made for it."""
    return pc.or_(pc.is_null(address), pc.fill_null(pc.equal(address, sink), False))


def marks(rows: pa.Table) -> list[dict[str, Any]]:
    """The `t` and `g` rows."""
    return rows.filter(pc.is_in(rows["op"], _FENCES)).select(_MARK).to_pylist()


def add_fences(fences: dict[int, Fence], marks: Iterable[Mapping[str, Any]]) -> None:
    """Add `t` and `g` rows to the fences by relation."""
    for mark in marks:
        fence = fences.get(mark["relation"], Fence())
        if mark["op"] == Operation.TRUNCATE:
            fences[mark["relation"]] = fence.cleared((mark["position"], mark["ordinal"]))
        else:
            fences[mark["relation"]] = fence.regenerated(int(bytes(mark["payload"])))


def hidden(rows: pa.Table, fences: Mapping[int, Fence]) -> pa.ChunkedArray:
    """Which rows, with `relation`, `position` and `ordinal`, are gone; one look, however many relations there are."""
    which = pc.index_in(rows["relation"], pa.array(fences, pa.int64()))
    bounds = (
        pc.take(pa.array([getattr(fence, name) for fence in fences.values()], pa.int64()), which)
        for name in ("position", "ordinal", "generation")
    )
    return pc.fill_null(_ended(rows, *bounds), False)


def _ended(rows: pa.Table, position: Any, ordinal: Any, generation: Any) -> pa.ChunkedArray:
    """Which rows stand before a truncate at a place, or before a generation; one for all rows, or one for each."""
    at_truncate = pc.and_(pc.equal(rows["position"], position), pc.less(rows["ordinal"], ordinal))
    cleared = pc.or_(pc.less(rows["position"], position), at_truncate)
    return pc.or_(cleared, pc.less(rows["position"], generation))


def _links(moved: list[dict[str, Any]]) -> int:
    """The longest chain of moves, taking every move of a key that was itself moved to as a link."""
    depth: dict[tuple[int, tuple[str, ...]], int] = {}
    for row in sorted(moved, key=lambda row: (row["position"], row["ordinal"])):
        before = depth.get((row["relation"], tuple(row["old_key"])), 0)
        depth[row["relation"], tuple(row["key"])] = before + 1
    return max(depth.values(), default=0)
