"""Folded parts: the folded rows of a large range, which Spark's executors keep until the batch ends.

A part has all rows of its keys, so it is written without the others. Of a table with history, it has every change of
its keys. Its rows are divided into pieces of at most PIECE_ROWS rows of one table. A piece is one row of a Spark frame,
with the folded rows as an Arrow IPC stream: no row image passes through the JVM. The frame is stored on the executors'
disks. Spark computes a piece again, from the files of the log, if its executor is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, starmap
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.folding.fold import FOLDED_ARROW
from pipelines.folding.key_parts import from_ipc, to_ipc

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STEP_BYTES: Final = 32 << 20
"""Approximate bytes of rows that one Spark job of `collect_in_steps` sends to the driver."""
PIECE_ROWS: Final = 65_536
"""Maximum folded rows of a piece; a task has the rows of one piece in memory, as texts and as typed columns."""
PIECES: Final = (
    "part int, relation long, rows long, keys long, size long, incomplete long, keyless long, committed_at long, "
    "images binary"
)
"""The columns of the frame of pieces: number of the part, relation, number of rows, number of keys that no other piece
counts, bytes in memory, number of incomplete rows, number of rows without a key, median commit time in µs, and the rows
as an Arrow IPC stream.
"""
IMAGES: Final = "part int, images binary"
"""The columns of a frame of pieces of one table that a function has changed: number of the part, rows as a stream."""
_COUNTED: Final = ("rows", "keys", "incomplete", "keyless")
KEY_SEPARATOR: Final = "\0"
"""Separator between the column values of a key that is joined to one text; Postgres text never contains it."""

Piece = tuple[int, pa.Table]
"""Number of a part, and some of its folded rows (FOLDED_ARROW), all of one table."""


@dataclass(frozen=True, slots=True)
class FoldedTable:
    """Sizes of the folded rows that the executors have of one table."""

    relation: int
    rows: int
    keys: int
    """Number of keys that have a row; for a table with history, a key may have several rows."""
    size: int
    """Bytes of the rows in memory, as Arrow."""
    incomplete: int
    """Number of rows whose unsent columns are not in the range."""
    keyless: int
    """Number of rows without a key."""
    committed_at: int
    """Approximate median commit time of the rows, in µs since 1970 UTC."""


@dataclass(frozen=True, slots=True)
class FoldedParts:
    """The folded rows of one table, on the executors; methods that return rows to the driver say how many."""

    pieces: DataFrame
    """A stored frame with the columns PIECES, of all tables."""
    table: FoldedTable
    parts: int
    """Number of parts into which the keys are divided."""
    excluded: tuple[str, ...] = ()
    """Keys, as `key_texts` returns them, whose rows are left out."""
    applied: int = 0
    """Position up to which rows are left out."""

    @property
    def session(self) -> SparkSession:
        """The Spark session of the pieces."""
        return self.pieces.sparkSession

    def map_parts(self, convert: Callable[[Iterator[Piece]], Iterator[pa.RecordBatch]], columns: Any) -> DataFrame:
        """Return the frame of the batches that executors make of each part.

        convert: function (pieces of a part) → batches; it may get none. columns: the Spark schema of these batches.
        """
        excluded, applied = pa.array(self.excluded, pa.string()), self.applied

        def pieces_in(batches: Iterator[pa.RecordBatch]) -> Iterator[Piece]:
            for batch in batches:
                for part, stream in zip(batch["part"].to_pylist(), batch["images"], strict=True):
                    rows = from_ipc(stream.as_buffer())
                    if len(excluded):
                        rows = rows.filter(pc.invert(pc.is_in(key_texts(rows["key"]), excluded)))
                    if applied:
                        rows = rows.filter(pc.greater(rows["position"], applied))
                    if rows.num_rows:
                        yield part, rows

        of_table = self.pieces.where(f"relation = {int(self.table.relation)}").select("part", "images")
        return of_table.mapInArrow(lambda batches: convert(pieces_in(batches)), columns)

    def map_pieces(self, convert: Callable[[int, pa.Table], Iterable[pa.RecordBatch]], columns: Any) -> DataFrame:
        """Return the frame of the batches that executors make of each piece.

        convert: function (number of the part, folded rows) → batches. columns: the Spark schema of these batches.
        """
        return self.map_parts(lambda pieces: chain.from_iterable(starmap(convert, pieces)), columns)

    def split_off(self, keys: Iterable[str]) -> tuple[pa.Table, FoldedParts]:
        """Return (the rows of some keys, the other rows); a row belongs to a key if its key or base is this key.

        The rows of `keys` come to the driver: at most two for each, or all changes of a table with history. keys: as
        `key_texts` returns them.
        """
        wanted = pa.array(sorted(keys), pa.string())

        def select(part: int, rows: pa.Table) -> Iterator[pa.RecordBatch]:
            has_key = pc.or_(
                pc.is_in(key_texts(rows["key"]), wanted),
                pc.fill_null(pc.is_in(key_texts(rows["base"]), wanted), fill_value=False),
            )
            if (chosen := rows.filter(has_key)).num_rows:
                yield piece_of_images(part, chosen)

        rows, _ = collect_in_steps(self.map_pieces(select, IMAGES))
        return rows, self.without(rows)

    def without(self, rows: pa.Table) -> FoldedParts:
        """Return the rows of other keys. rows: all rows that the executors have of the keys to leave out."""
        keys = key_texts(rows["key"]).unique().to_pylist()
        left = replace(self.table, rows=self.table.rows - rows.num_rows, keys=self.table.keys - len(keys))
        return replace(self, table=left, excluded=tuple(sorted({*self.excluded, *keys})))

    def after(self, position: int) -> FoldedParts:
        """Return the rows after a position; a Spark job counts them."""
        later = replace(self, applied=max(self.applied, position))

        def count(pieces: Iterator[Piece]) -> Iterator[pa.RecordBatch]:
            if read := [rows.select(["key", "op", "complete"]) for _, rows in pieces]:
                yield _counts(pa.concat_tables(read))

        sums = [f"coalesce(sum({name}), 0) AS {name}" for name in _COUNTED]
        counted = later.map_parts(count, ", ".join(f"{name} long" for name in _COUNTED)).selectExpr(*sums).first()
        return later if counted is None else replace(later, table=replace(self.table, **counted.asDict()))

    def has_any(self, is_concerned: Callable[[pa.Table], bool]) -> bool:
        """Return whether a function returns true for the rows of any piece."""

        def select(part: int, rows: pa.Table) -> Iterator[pa.RecordBatch]:
            if is_concerned(rows):
                yield pa.RecordBatch.from_pydict({"part": pa.array([part], pa.int32())})

        return self.map_pieces(select, "part int").first() is not None


def sum_by_table(pieces: Iterable[Mapping[str, int]]) -> list[FoldedTable]:
    """Return the sizes of each table, in the order of the relations.

    pieces: rows of a frame with the columns PIECES, without `part` and `images`.
    """
    by_relation: defaultdict[int, list[Mapping[str, int]]] = defaultdict(list)
    for piece in pieces:
        by_relation[piece["relation"]].append(piece)
    return [
        FoldedTable(
            relation=relation,
            committed_at=_median(sorted((piece["committed_at"], piece["rows"]) for piece in own)),
            **{name: sum(piece[name] for piece in own) for name in ("rows", "keys", "size", "incomplete", "keyless")},
        )
        for relation, own in sorted(by_relation.items())
    ]


def _median(weighted: Sequence[tuple[int, int]]) -> int:
    """Return the median of sorted pairs (value, number of rows with it)."""
    reached = np.cumsum([rows for _, rows in weighted])
    return weighted[int(np.searchsorted(reached, reached[-1] / 2))][0]


def first_images(pieces: DataFrame, limit: int) -> pa.Table:
    """Return the rows of a frame with the columns IMAGES to the driver, at most one piece more than `limit` rows."""

    def take(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = 0
        for batch in batches:
            for stream in batch["images"]:
                images = from_ipc(stream.as_buffer())
                if rows <= limit:
                    yield piece_of_images(0, images.slice(0, limit + 1 - rows))
                    rows += images.num_rows

    return collect_images(pieces.repartition(1).mapInArrow(take, IMAGES))


def key_texts(keys: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return each key as one text; null for a null key."""
    return pc.binary_join(keys, KEY_SEPARATOR)


def piece_of_images(part: int, rows: pa.Table) -> pa.RecordBatch:
    """Return a row of a frame with the columns IMAGES."""
    return pa.RecordBatch.from_pydict({"part": pa.array([part], pa.int32()), "images": [to_ipc(rows)]})


def pieces_of(part: int, folded: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield the folded rows of one part as rows of a frame with the columns PIECES."""
    relations = folded["relation"].unique().to_pylist()
    for relation in relations:
        own = folded if len(relations) == 1 else folded.filter(pc.equal(folded["relation"], relation))
        keys = _count_keys(own)
        for start in range(0, own.num_rows, PIECE_ROWS):
            yield _piece(part, relation, own.slice(start, PIECE_ROWS), keys)
            keys = 0


def _piece(part: int, relation: int, rows: pa.Table, keys: int) -> pa.RecordBatch:
    median = pc.quantile(rows["committed_at"].cast(pa.int64()), 0.5)[0].as_py()
    columns = {
        "part": pa.array([part], pa.int32()),
        "relation": pa.array([relation], pa.int64()),
        "rows": [rows.num_rows],
        "keys": [keys],
        "size": [rows.nbytes],
        "incomplete": [_count_incomplete(rows)],
        "keyless": [rows["key"].null_count],
        "committed_at": pa.array([0 if median is None else int(median)], pa.int64()),
        "images": [to_ipc(rows)],
    }
    return pa.RecordBatch.from_pydict(columns)


def _counts(rows: pa.Table) -> pa.RecordBatch:
    counts = (rows.num_rows, _count_keys(rows), _count_incomplete(rows), rows["key"].null_count)
    return pa.RecordBatch.from_pydict({name: [number] for name, number in zip(_COUNTED, counts, strict=True)})


def _count_keys(rows: pa.Table) -> int:
    return int(pc.count_distinct(key_texts(rows["key"])).as_py())


def _count_incomplete(rows: pa.Table) -> int:
    partial = pc.invert(pc.fill_null(rows["complete"], fill_value=True))
    return int(pc.sum(pc.and_(pc.not_equal(rows["op"], "d"), partial)).as_py() or 0)


def collect_in_steps(pieces: DataFrame, most_upserts: int | None = None) -> tuple[pa.Table, bool]:
    """Return the rows of a frame with the columns IMAGES to the driver, and whether these are all of its rows.

    most_upserts: if the frame has more upserts than this, only the rows of one piece are returned. A Spark job sends
    about STEP_BYTES, so that the rows may be more than `spark.driver.maxResultSize`.
    """
    from pyspark import StorageLevel

    divided = pieces.repartition(1).mapInArrow(divide_in_steps, f"step int, upserts long, {IMAGES}")
    stored = divided.persist(StorageLevel.DISK_ONLY)
    try:
        numbers = stored.selectExpr("sum(upserts) AS upserts", "max(step) AS last").collect()[0]
        if numbers["last"] is None:
            return FOLDED_ARROW.empty_table(), True
        if most_upserts is not None and numbers["upserts"] > most_upserts:
            return collect_images(stored.where("upserts > 0").select("part", "images").limit(1)), False
        steps = (stored.where(f"step = {step}").select("part", "images") for step in range(numbers["last"] + 1))
        return pa.concat_tables(map(collect_images, steps)), True
    finally:
        stored.unpersist()


def divide_in_steps(batches: Iterator[pa.RecordBatch], step_bytes: int = STEP_BYTES) -> Iterator[pa.RecordBatch]:
    """Yield the rows of pieces as pieces of about `step_bytes` at most, with the number of the step that sends them."""
    size = 0
    for batch in batches:
        for stream in batch["images"]:
            rows = from_ipc(stream.as_buffer())
            most_rows = max(1, step_bytes * rows.num_rows // max(1, rows.nbytes))
            for start in range(0, rows.num_rows, most_rows):
                taken = rows.slice(start, most_rows)
                piece = piece_of_images(0, taken)
                upserts = pc.sum(pc.equal(taken["op"], "u")).as_py() or 0
                yield pa.RecordBatch.from_arrays(
                    [pa.array([size // step_bytes], pa.int32()), pa.array([upserts]), *piece.columns],
                    names=["step", "upserts", *piece.schema.names],
                )
                size += taken.nbytes


def collect_images(pieces: DataFrame, *, at_once: bool = True) -> pa.Table:
    """Return the rows of a frame with the columns IMAGES to the driver.

    at_once: with one Spark job, for rows whose number the caller has limited. Otherwise one job after the other gets
    the rows of each Spark partition, so that they may be more than `spark.driver.maxResultSize`.
    """
    found = [from_ipc(bytes(row["images"])) for row in (pieces.collect() if at_once else pieces.toLocalIterator())]
    return pa.concat_tables([FOLDED_ARROW.empty_table(), *found])
