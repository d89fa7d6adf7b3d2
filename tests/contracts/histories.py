"""What each mode keeps of a log, in plain Python, and the batches that a sink gets of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import SinkRule, TableSettings, TargetMode
from cdc.config.delta_sink import HistoryMode
from cdc.position import Position
from cdc.table import ReplicaIdentity, TableSchema
from cdc.targets.lake_reader import read_target
from pipelines.folding.fold import fold
from pipelines.folding.folded_batch import split_by_table
from pipelines.folding.history_changes import every_change, single_changes
from pipelines.sinks.contract import Published, TableBatch, TableRecord
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import column
from tests.pipelines.fold_model import SINK, Image, Row, to_arrow

RELATION = 16384
TABLE = TableSchema(
    relation=RELATION,
    oid=RELATION,
    schema="t",
    name="lives",
    replica_identity=ReplicaIdentity.DEFAULT,
    columns=(column(1, "id", "bigint", oid=20, key=0), column(2, "plain"), column(3, "large"), column(4, "huge")),
)
"""The table of tests.pipelines.fold_model."""


class Lake:
    """A Delta sink with one table, fed from log rows; each driver opens it anew."""

    def __init__(
        self,
        path: str,
        table: TableSettings,
        writer: Writer = Writer.INDEXED,
        spark: Any = None,
        rules: tuple[SinkRule, ...] = (),
    ) -> None:
        self._settings = DeltaSettings(SINK, f"{path}/{{schema}}/{{table}}", writer, table, rules)
        self._spark = spark
        self.uri = f"{path}/t/lives"
        self.start()

    def start(self) -> None:
        """A new driver."""
        self.sink = DeltaSink(self._settings, self._spark)
        self.sink.open("log-1")

    def apply(self, rows: Sequence[Row], after: int, upto: int, schema: TableSchema = TABLE) -> TableRecord:
        """One batch."""
        return self.sink.apply(batch(rows, after, upto, schema, every=self.sink.keeps_history(schema)))

    def publish(self, record: TableRecord, position: int) -> None:
        """One cut."""
        self.sink.publish(Published(position, 0, {record.relation: record}))

    def rows(self) -> list[dict[str, Any]]:
        """Everything that the target holds."""
        return read_target(self.uri, None).read_all().to_pylist()


def batch(
    rows: Sequence[Row], after: int, upto: int, schema: TableSchema = TABLE, *, since: int = 0, every: bool = True
) -> TableBatch:
    """The range (after, upto] of one table as the loop gives it to a target that keeps history, or to one of states."""
    found = to_arrow(row for row in rows if after < row["position"] <= upto)
    single = single_changes(found, {schema.relation} if every else set(), Position(after))
    folded = fold(found.filter(pc.invert(single)), sink=SINK)
    told = split_by_table(pa.concat_tables([folded, every_change(found.filter(single), sink=SINK)]))
    controls = told.controls.get(schema.relation)
    made = TableBatch(
        schema=schema, rows=told.rows_of(schema.relation), frame=None, after=after, upto=upto, since=since
    )
    if controls is None:
        return made
    return replace(
        made,
        truncated=controls.truncated,
        generation=controls.generation,
        endings=controls.endings,
        schema=controls.schema or schema,
    )


class Table:
    """The source's table after each row of the log."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[tuple[int, int], Image]] = {}
        self._moving: Image = {}

    def apply(self, row: Row) -> Image | None:
        """One row; returns the whole image of a changed one."""
        place, key = (row["position"], row["ordinal"]), row["key"][0] if row["key"] else ""
        if row["op"] == "t":
            self.rows.clear()
        elif row["op"] == "g":
            self.rows = {k: held for k, held in self.rows.items() if held[0][0] >= int(row["payload"])}
        elif row["op"] == "d":
            self._moving = self.rows.pop(key, (place, {}))[1]
        elif row["op"] in "cru":
            older = self._moving if row["old_key"] else self.rows.get(key, (place, {}))[1]
            self.rows[key] = place, (older if row["partial"] else {}) | row["after"]
            return self.rows[key][1]
        return None


def ours(rows: Iterable[Row]) -> list[Row]:
    """The rows that are not meant for another sink, and say something of rows."""
    return [row for row in rows if row["address"] in (None, SINK) and row["op"] != "s"]


def transactions(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    """The rows by position."""
    for position, held in groupby(ours(rows), key=lambda row: row["position"]):
        yield position, list(held)


def versions(rows: Iterable[Row], tracked: Sequence[int] = (2, 3, 4)) -> list[tuple[Any, ...]]:
    """(image, start, end) of every version, in any order."""
    table, closed = Table(), []
    current: dict[str, tuple[Image, int]] = {}
    for position, changes in transactions(rows):
        for row in changes:
            table.apply(row)
        for key in {*table.rows, *current}:
            image = table.rows[key][1] if key in table.rows else None
            held = current.get(key)
            same = held and image and all(held[0].get(c) == image.get(c) for c in tracked)
            if held and not same:
                closed.append((*current.pop(key), position))
            if image is not None:
                current[key] = (dict(image), held[1] if held and same else position)
    return closed + [(image, start, None) for image, start in current.values()]


def latest(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
    """(position, ordinal, image) of every row of the table as it stands in the end."""
    table = Table()
    for row in ours(rows):
        table.apply(row)
    return [(*place, image) for place, image in table.rows.values()]


def marked(rows: Iterable[Row]) -> list[tuple[Image, bool]]:
    """(image, whether it is deleted) of every key that ever had a row."""
    table = Table()
    seen: dict[str, Image] = {}
    for row in ours(rows):
        table.apply(row)
        seen |= {key: image for key, (_, image) in table.rows.items()}
    return [(image, key not in table.rows) for key, image in seen.items()]


def every(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
    """(position, ordinal, op, image or key) of every row."""
    table = Table()
    found = []
    for row in ours(rows):
        image = table.apply(row)
        said = image if image is not None else {1: row["key"][0]} if row["op"] == "d" else {}
        found.append((row["position"], row["ordinal"], row["op"], said))
    return found


def image_of(row: dict[str, Any], schema: TableSchema = TABLE) -> Image:
    """The source's columns of a target's row, as text, without nulls of a row that has no image."""
    return {held.id: None if row[held.name] is None else str(row[held.name]) for held in schema.columns}


def whole(image: Image, schema: TableSchema = TABLE) -> Image:
    """An image with every column."""
    return {held.id: image.get(held.id) for held in schema.columns}


SETTINGS: Final = {
    HistoryMode.VERSIONS: TableSettings(stored_as_scd_type=2),
    HistoryMode.MARKED: TableSettings(mode=TargetMode.SOFT_DELETE),
    HistoryMode.CHANGES: TableSettings(mode=TargetMode.APPEND),
}
"""Of the modes that keep more of a row than its latest state."""
ALL_SETTINGS: Final = {HistoryMode.LATEST: TableSettings(), **SETTINGS}


def in_order(found: list[Any]) -> list[Any]:
    """Rows of any kind in one order."""
    return sorted(found, key=repr)


def kept(lake: Lake, keeping: HistoryMode, schema: TableSchema = TABLE) -> list[Any]:
    """What a target holds, as its model tells it; schema: the columns to look at, by their names there."""
    rows = [(row, image_of(row, schema)) for row in lake.rows()]
    if keeping is HistoryMode.VERSIONS:
        return in_order([(image, row["__START_AT"], row["__END_AT"]) for row, image in rows])
    if keeping is HistoryMode.MARKED:
        return in_order([(image, row["_deleted"]) for row, image in rows])
    op = ("_op",) if keeping is HistoryMode.CHANGES else ()
    return in_order([(*(row[name] for name in ("_position", "_ordinal", *op)), image) for row, image in rows])


def _tracked(schema: TableSchema) -> list[int]:
    return [held.id for held in schema.columns if held.key is None]


def _with_images(found: list[tuple[Any, ...]], schema: TableSchema) -> list[Any]:
    return in_order([(*place, whole(image, schema)) for *place, image in found])


MODELS: Final[dict[HistoryMode, Callable[..., list[Any]]]] = {
    HistoryMode.LATEST: lambda rows, schema=TABLE: _with_images(latest(rows), schema),
    HistoryMode.VERSIONS: lambda rows, schema=TABLE: in_order(
        [(whole(image, schema), *times) for image, *times in versions(rows, _tracked(schema))]
    ),
    HistoryMode.MARKED: lambda rows, schema=TABLE: in_order(
        [(whole(image, schema), gone) for image, gone in marked(rows)]
    ),
    HistoryMode.CHANGES: lambda rows, schema=TABLE: _with_images(every(rows), schema),
}
"""What a target holds of a log (rows), whose columns in the end are those of schema, however it was applied."""
