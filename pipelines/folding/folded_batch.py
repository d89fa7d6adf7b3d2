"""Folded rows of one batch, taken apart by table: pure, and the same for every sink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import ROW_OPERATIONS, Operation
from cdc.table import TableSchema
from pipelines.folding.every_change import GenerationEnd

_CONTROL: Final = ["committed_at", "relation", "op", "position", "ordinal", "payload"]


@dataclass(frozen=True, slots=True)
class ControlEvents:
    """What the control rows of one range say of one relation."""

    schema: TableSchema | None = None
    """Its latest schema in the range; None if that did not change."""
    truncated: tuple[int, int] | None = None
    """(position, ordinal) of the last truncate."""
    generation: int | None = None
    """Where the last completed full copy began."""
    endings: tuple[GenerationEnd, ...] = ()
    """Every truncate and every end of a full copy, in order."""


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
    """FOLDED rows with op u or d; of tables whose history is kept, every change (pipelines.folding.every_change)."""
    controls: Mapping[int, ControlEvents] = field(default_factory=dict)
    """By relation."""
    since: int = 0
    """Of tables whose history is kept, changes up to here are not there one by one, but what they come to is."""

    @property
    def relations(self) -> list[int]:
        """Every relation that the range says something of."""
        return sorted({*self.images["relation"].unique().to_pylist(), *self.controls})

    def rows_of(self, relation: int) -> pa.Table:
        """The images of one relation."""
        return self.images.filter(pc.equal(self.images["relation"], relation))


def take_apart(folded: pa.Table) -> FoldedBatch:
    """FOLDED rows → images, and controls by relation."""
    is_image = pc.is_in(folded["op"], pa.array(sorted(ROW_OPERATIONS)))
    controls: dict[int, ControlEvents] = {}
    rest = folded.filter(pc.invert(is_image)).select(_CONTROL)
    rest = rest.set_column(0, "committed_at", rest["committed_at"].cast(pa.int64()))
    for row in rest.sort_by([("position", "ascending"), ("ordinal", "ascending")]).to_pylist():
        if row["relation"] is not None:
            seen = controls.get(row["relation"], ControlEvents())
            controls[row["relation"]] = _with(seen, row)
    return FoldedBatch(folded.filter(is_image), controls)


def _with(seen: ControlEvents, row: Mapping[str, Any]) -> ControlEvents:
    if row["op"] == Operation.SCHEMA:
        return replace(seen, schema=TableSchema.from_json(row["payload"] or b""))
    ending = GenerationEnd.of(row)
    if ending is None:
        return seen
    seen = replace(seen, endings=(*seen.endings, ending))
    if ending.began is None:
        return replace(seen, truncated=(ending.position, ending.ordinal))
    return replace(seen, generation=ending.began)
