"""The folded rows of one batch, split by table into images and control events (truncates, ends of copies, schemas).

The rows of a large table may be on Spark's executors, see `pipelines.folding.folded_parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log_row import ROW_OPERATIONS, Operation
from cdc.table import TableSchema
from pipelines.folding.fold import FOLDED_ARROW, fold
from pipelines.folding.folded_parts import FoldedParts
from pipelines.folding.history_changes import GenerationEnd

TAKEN_ROWS: Final = 50_000
"""Maximum rows of a batch of which the rows of a table are taken by number; from a larger one they are filtered."""
_NO_NUMBERS: Final = np.empty(0, np.int64)
_CONTROL: Final = ["committed_at", "relation", "op", "position", "ordinal", "payload"]


@dataclass(frozen=True, slots=True)
class ControlEvents:
    """The schema changes, truncates and ends of full copies of one relation in a range."""

    schema: TableSchema | None = None
    """The latest schema in the range; None if it did not change."""
    truncated: tuple[int, int] | None = None
    """(position, ordinal) of the last truncate; None if there was none."""
    generation: int | None = None
    """Start position of the last full copy that ended in the range; None if none ended."""
    endings: tuple[GenerationEnd, ...] = ()
    """Every truncate and every end of a full copy, by position."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The position at which a batch ends."""

    position: int
    committed_at: int
    """Commit time of the transaction at that position in µs since 1970 UTC; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class FoldedBatch:
    """The folded rows of one range of the log: in the memory of the driver, or of large tables on the executors."""

    images: pa.Table
    """FOLDED_ARROW rows with op `u` or `d`; for targets with history, one row per change. They do not contain the rows
    of `parts`.
    """
    controls: Mapping[int, ControlEvents] = field(default_factory=dict)
    """Relation → its control events in the range."""
    since: int = 0
    """For targets with history: `images` has the latest states up to this position, and single changes after it.

    0: `images` has only single changes.
    """
    parts: Mapping[int, FoldedParts] = field(default_factory=dict)
    """Relation → its folded rows, for the tables whose rows stay on the executors."""
    release: Callable[[], object] = lambda: None
    """Function that lets the executors remove the rows of `parts`; called once, when the batch has ended."""
    _numbers: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Relation → numbers of its rows in `images`, ascending; `rows_of` fills it when it is first called."""

    @property
    def relations(self) -> list[int]:
        """Relations with images or control events in the range."""
        return sorted({*self.images["relation"].unique().to_pylist(), *self.controls, *self.parts})

    @property
    def rows(self) -> int:
        """Number of the rows of all tables, on the driver and on the executors."""
        return self.images.num_rows + sum(parts.table.rows for parts in self.parts.values())

    @property
    def committed_at(self) -> float | None:
        """Median commit time of the rows in µs since 1970 UTC; None without rows. Approximate if there are `parts`."""
        middle = pc.quantile(self.images["committed_at"].cast(pa.int64()), 0.5)[0].as_py()
        medians = [] if middle is None else [(float(middle), self.images.num_rows)]
        medians += [(float(parts.table.committed_at), parts.table.rows) for parts in self.parts.values()]
        before = 0
        for median, rows in sorted(medians):
            before += rows
            if 2 * before >= self.rows:
                return median
        return None

    def rows_of(self, relation: int) -> pa.Table:
        """Return the rows of `images` that belong to one relation; without a copy if they follow each other."""
        if not self._numbers:
            self._numbers.update(_numbers_by_relation(self.images["relation"].to_numpy()))
        numbers = self._numbers.get(relation, _NO_NUMBERS)
        if numbers.size == self.images.num_rows:
            return self.images
        if not numbers.size or numbers[-1] - numbers[0] == numbers.size - 1:
            return self.images.slice(numbers[0] if numbers.size else 0, numbers.size)
        if self.images.num_rows > TAKEN_ROWS:  # take would first concatenate the chunks of all files
            return self.images.filter(pc.equal(self.images["relation"], relation))
        return self.images.take(pa.array(numbers))

    def count_rows(self, relations: Iterable[int]) -> dict[int, int]:
        """Return relation → number of its rows in `images`, for the given relations."""
        counts = self.images["relation"].value_counts()
        found = dict(zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True))
        found |= {relation: parts.table.rows for relation, parts in self.parts.items()}
        return {relation: found.get(relation, 0) for relation in relations}


def _numbers_by_relation(relations: np.ndarray) -> dict[int, np.ndarray]:
    """Return relation → numbers of the rows that belong to it, ascending."""
    if not relations.size:
        return {}
    if relations.min() == relations.max():
        return {int(relations[0]): np.arange(relations.size)}
    order = np.argsort(relations, kind="stable")
    found, starts = np.unique(relations[order], return_index=True)
    return dict(zip(found.tolist(), np.split(order, starts[1:]), strict=True))


NO_CHANGES: Final = FoldedBatch(FOLDED_ARROW.empty_table())
"""The batch of a range without changes."""


def fold_by_table(rows: pa.Table, *, sink: str) -> FoldedBatch:
    """Fold log rows as `fold` does, and split the result by table."""
    return split_by_table(fold(rows, sink=sink))


def split_by_table(folded: pa.Table) -> FoldedBatch:
    """Split FOLDED_ARROW rows into images and control events by relation."""
    is_image = pc.is_in(folded["op"], pa.array(sorted(ROW_OPERATIONS)))
    if pc.all(is_image).as_py():
        return FoldedBatch(folded)
    return FoldedBatch(folded.filter(is_image), control_events(folded.filter(pc.invert(is_image))))


def control_events(rows: pa.Table) -> dict[int, ControlEvents]:
    """Return relation → its control events; rows: log rows of schema changes, truncates and ends of full copies."""
    controls: dict[int, ControlEvents] = {}
    control_rows = rows.select(_CONTROL)
    control_rows = control_rows.set_column(0, "committed_at", control_rows["committed_at"].cast(pa.int64()))
    for row in control_rows.sort_by([("position", "ascending"), ("ordinal", "ascending")]).to_pylist():
        if row["relation"] is not None:
            events = controls.get(row["relation"], ControlEvents())
            controls[row["relation"]] = _add_event(events, row)
    return controls


def _add_event(events: ControlEvents, row: Mapping[str, Any]) -> ControlEvents:
    if row["op"] == Operation.SCHEMA:
        return replace(events, schema=TableSchema.from_json(row["payload"] or b"").following(events.schema))
    ending = GenerationEnd.of(row)
    if ending is None:
        return events
    events = replace(events, endings=(*events.endings, ending))
    if ending.began is None:
        return replace(events, truncated=(ending.position, ending.ordinal))
    return replace(events, generation=ending.began)
