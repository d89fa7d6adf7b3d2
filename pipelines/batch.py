"""Folded rows of one batch, taken apart by table: pure, and the same for every sink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import Operation
from cdc.table import TableSchema


@dataclass(frozen=True, slots=True)
class TableControls:
    """What the control rows of one range say of one relation."""

    schema: TableSchema | None = None
    """Its latest schema in the range; None if that did not change."""
    truncated: tuple[int, int] | None = None
    """(position, ordinal) of the last truncate."""
    generation: int | None = None
    """Where the last completed full copy began."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where a batch ends."""

    position: int
    committed_at: int
    """µs UTC; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class FoldedBatch:
    """One folded range on the driver."""

    images: pa.Table
    """FOLDED rows with op u or d."""
    controls: Mapping[int, TableControls] = field(default_factory=dict)
    """By relation."""

    @property
    def relations(self) -> list[int]:
        """Every relation that the range says something of."""
        return sorted({*self.images["relation"].unique().to_pylist(), *self.controls})

    def rows_of(self, relation: int) -> pa.Table:
        """The images of one relation."""
        return self.images.filter(pc.equal(self.images["relation"], relation))


def take_apart(folded: pa.Table) -> FoldedBatch:
    """FOLDED rows → images, and controls by relation."""
    is_image = pc.is_in(folded["op"], pa.array([Operation.UPDATE.value, Operation.DELETE.value]))
    controls: dict[int, TableControls] = {}
    rest = folded.filter(pc.invert(is_image)).select(["relation", "op", "position", "ordinal", "payload"])
    for row in rest.sort_by([("position", "ascending"), ("ordinal", "ascending")]).to_pylist():
        if row["relation"] is not None:
            seen = controls.get(row["relation"], TableControls())
            controls[row["relation"]] = _with(seen, row["op"], (row["position"], row["ordinal"]), row["payload"])
    return FoldedBatch(folded.filter(is_image), controls)


def _with(seen: TableControls, op: str, place: tuple[int, int], payload: bytes | None) -> TableControls:
    if op == Operation.SCHEMA:
        return TableControls(TableSchema.from_json(payload or b""), seen.truncated, seen.generation)
    if op == Operation.TRUNCATE:
        return TableControls(seen.schema, place, seen.generation)
    if op == Operation.GENERATION:
        return TableControls(seen.schema, seen.truncated, int(payload or b"0"))
    return seen
