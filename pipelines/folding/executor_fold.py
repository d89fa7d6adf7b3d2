"""The fold by executors: a large range of the log is read and folded by Spark's executors, and stays there.

1. A survey reads narrow columns of all files. The driver gets the control rows, and the number of partial images.
2. Executors read the log again, group of files by group of files, and divide the rows into parts by key. Without
   partial images, a group keeps only the latest row of each key.
3. One task for each part folds its rows with `fold`, the specification. So the result is that of the driver's fold.
4. The folded rows stay on the executors' disks as `FoldedParts`. The driver gets their numbers by table.

Partial images that move rows to other keys connect the keys, and connected keys are in one part. The driver needs
these keys for that. With more than MAX_MOVES of them, `spark_fold` folds the range instead.

So the driver gets control rows, at most MAX_MOVES moved keys, and numbers: no row images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.disk_format import LogFile
from cdc.log.file_selection import TableSelection, split
from cdc.log.reader import stream_file
from cdc.log_row import LOG_SCHEMA, ROW_OPERATIONS, Operation
from cdc.position import Position
from pipelines.folding.fences_and_statistics import Fence, add_fences, addressed_to, fence_rows, is_fenced
from pipelines.folding.fold import FOLDED_ARROW, fold, latest_per_key, split_keyless
from pipelines.folding.folded_parts import PIECES, FoldedParts, FoldedTable, collect_images, pieces_of
from pipelines.folding.history_changes import single_changes
from pipelines.folding.key_parts import (
    MOVE_SCHEMA,
    from_ipc,
    moves_as_texts,
    parts_of_moved_keys,
    split_by_part,
    to_ipc,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SPLIT_BYTES: Final = 8 << 20
"""Approximate log bytes that one Spark task reads; with small tasks, the last task ends soon after the others."""
PART_ROWS: Final = 500_000
"""Approximate log rows of one part; folding them takes a worker half a second and several hundred bytes per row."""
PART_BYTES: Final = 32 << 20
"""Approximate log bytes of one part; a worker needs several times as much memory."""
READ_ROWS: Final = 131_072
"""Number of log rows that a task divides into parts at once."""
MAX_MOVES: Final = 100_000
"""Maximum number of partial images that move a row to another key; the driver and each task need their keys."""

COLLECTED_BYTES: Final = 32 << 20
"""Maximum bytes of folded rows, as Arrow in memory, that one Spark job sends to the driver."""

_SURVEYED: Final = ("position", "ordinal", "relation", "op", "payload", "address", "committed_at", "partial")
_KEYS: Final = ("key", "old_key")
_FOLDED: Final = (*_SURVEYED, *_KEYS, "after", "before")
_CONTROL: Final = [name for name in _SURVEYED if name not in ("address", "partial")]
_CONTROL_SCHEMA: Final = pa.schema([LOG_SCHEMA.field(name) for name in _CONTROL])
_CONTROLS: Final = pa.array([Operation.SCHEMA.value, Operation.TRUNCATE.value, Operation.GENERATION.value])
_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRange:
    """The rows of the log that are folded for one sink. Executors receive pickled instances."""

    files: tuple[LogFile, ...]
    after: Position
    upto: Position
    tables: TableSelection
    sink: str
    """Name of the sink; rows addressed to other sinks are ignored."""
    kept: frozenset[int] = frozenset()
    """Relations whose history the sink keeps: their single changes after `since` are not folded."""
    since: int = 0

    def read(self, files: Sequence[LogFile], columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of some files that are for the sink, with the given columns and `address`."""
        for file in files:
            for rows in stream_file(file, self.after, self.upto, columns, self.tables):
                yield rows.filter(addressed_to(rows["address"], self.sink))

    def read_images(self, files: Sequence[LogFile], fences: dict[int, Fence]) -> Iterator[pa.Table]:
        """Yield the row images of some files that are folded, in tables of about READ_ROWS rows."""
        read: list[pa.Table] = []
        for rows in self.read(files, _FOLDED):
            images = rows.filter(pc.is_in(rows["op"], _ROWS))
            if fences:
                images = images.filter(pc.invert(is_fenced(images, fences)))
            if self.kept:
                images = images.filter(pc.invert(single_changes(images, self.kept, self.since)))
            read.append(_without_needless_images(images))
            if sum(table.num_rows for table in read) >= READ_ROWS:
                yield pa.concat_tables(read)
                read = []
        if read:
            yield pa.concat_tables(read)


@dataclass(frozen=True, slots=True)
class Survey:
    """What the driver must know of a range before it is folded."""

    controls: pa.Table
    """Schema changes, truncates and ends of full copies, in any order."""
    partial: int
    """Number of partial images."""
    moves: int
    """Number of partial images that move a row to another key."""

    @property
    def fences(self) -> dict[int, Fence]:
        """Relation → its fence, for each relation with a truncate or a finished full copy in the range."""
        fences: dict[int, Fence] = {}
        add_fences(fences, fence_rows(self.controls))
        return fences


@dataclass
class ExecutorFold:
    """One range of the log that executors fold, until `release`."""

    session: SparkSession
    rows: LogRange
    parts: int = 0
    """Number of parts into which the keys are divided; 0: by the size of the files."""
    max_moves: int = MAX_MOVES
    _stored: list[DataFrame] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        files = self.rows.files
        sizes = -(-sum(f.rows for f in files) // PART_ROWS), -(-sum(f.size for f in files) // PART_BYTES)
        self.parts = self.parts or max(1, *sizes)
        self._groups = split(files, SPLIT_BYTES)

    @cached_property
    def survey(self) -> Survey:
        """The survey of the range; the first access runs a Spark job."""
        groups, rows = self._groups, self.rows

        def count(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for number in _numbers(numbers):
                yield _surveyed(rows, groups[number])

        found = self._tasks().mapInArrow(count, "controls binary, partial long, moves long").collect()
        controls = [from_ipc(bytes(row["controls"])) for row in found]
        return Survey(
            pa.concat_tables([_CONTROL_SCHEMA.empty_table(), *controls]),
            sum(row["partial"] for row in found),
            sum(row["moves"] for row in found),
        )

    @property
    def is_divisible(self) -> bool:
        """Whether the driver can know which keys partial images connect; otherwise `spark_fold` folds the range."""
        return self.survey.moves <= self.max_moves

    def fold(self) -> list[FoldedTable]:
        """Fold the range, and store the folded rows on the executors; return their numbers by table."""
        return self.store(self._folded())

    def store(self, pieces: DataFrame) -> list[FoldedTable]:
        """Store a frame with the columns PIECES on the executors; return its numbers by table."""
        from pyspark import StorageLevel
        from pyspark.sql import functions as F

        stored = pieces.persist(StorageLevel.DISK_ONLY)
        self._stored.append(stored)
        sums = [F.sum(name).alias(name) for name in ("rows", "size", "incomplete", "keyless")]
        median = F.percentile("committed_at", F.lit(0.5), F.col("rows")).cast("long").alias("committed_at")
        return [FoldedTable(**row.asDict()) for row in stored.groupBy("relation").agg(*sums, median).collect()]

    def parts_of(self, table: FoldedTable) -> FoldedParts:
        """Return the folded rows of a table, which stay on the executors."""
        return FoldedParts(self._stored[-1], table, self.parts)

    def collect(self, tables: Sequence[FoldedTable]) -> pa.Table:
        """Return the folded rows of some tables to the driver."""
        if not tables:
            return FOLDED_ARROW.empty_table()
        listed = ", ".join(str(table.relation) for table in tables)
        pieces = self._stored[-1].where(f"relation IN ({listed})").select("part", "images")
        return collect_images(pieces, at_once=sum(table.size for table in tables) <= COLLECTED_BYTES)

    def release(self) -> None:
        """Let the executors remove the folded rows."""
        while self._stored:
            self._stored.pop().unpersist()

    def _folded(self) -> DataFrame:
        groups, rows, parts, sink = self._groups, self.rows, self.parts, self.rows.sink
        fences, only_latest = self.survey.fences, not self.survey.partial
        moved = parts_of_moved_keys(self._moves(), parts)

        def divide(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for number in _numbers(numbers):
                for images in rows.read_images(groups[number], fences):
                    yield from _divided(images, parts, moved, only_latest=only_latest)

        def fold_part(received: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            part, read = 0, []
            for batch in received:
                part = batch["part"][0].as_py()
                read += [from_ipc(stream.as_buffer()) for stream in batch["rows"]]
            if read:
                yield from pieces_of(part, fold(pa.concat_tables(read), sink=sink))

        divided = self._tasks().mapInArrow(divide, "part int, rows binary")
        return divided.repartitionById(parts, "part").mapInArrow(fold_part, PIECES)

    def _moves(self) -> pa.Table:
        if not self.survey.moves:
            return MOVE_SCHEMA.empty_table()
        groups, rows = self._groups, self.rows

        def find(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            columns = ["relation", "partial", "address", *_KEYS]
            for number in _numbers(numbers):
                with_partial = [file for file in groups[number] if file.partial]
                for read in rows.read(with_partial, columns):
                    if (moves := moves_as_texts(read)).num_rows:
                        yield pa.RecordBatch.from_pydict({"moves": [to_ipc(moves)]})

        found = [from_ipc(bytes(row["moves"])) for row in self._tasks().mapInArrow(find, "moves binary").collect()]
        return pa.concat_tables([MOVE_SCHEMA.empty_table(), *found])

    def _tasks(self) -> DataFrame:
        return self.session.range(0, len(self._groups), 1, max(1, len(self._groups)))


def pieces_of_frame(folded: DataFrame, parts: int) -> DataFrame:
    """Convert a frame of folded rows to a frame with the columns PIECES; each Spark partition belongs to one part."""

    def pack(received: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        part = 0 if context is None else context.partitionId() % parts
        for batch in received:
            rows = pa.Table.from_batches([batch])
            yield from pieces_of(part, rows.cast(pa.schema([FOLDED_ARROW.field(name) for name in rows.column_names])))

    return folded.where("op IN ('u', 'd')").mapInArrow(pack, PIECES)


def _numbers(batches: Iterator[pa.RecordBatch]) -> Iterator[int]:
    for batch in batches:
        yield from batch["id"].to_pylist()


def _surveyed(rows: LogRange, files: Sequence[LogFile]) -> pa.RecordBatch:
    controls, partial, moves = [_CONTROL_SCHEMA.empty_table()], 0, 0
    for file in files:
        for read in rows.read([file], [*_SURVEYED, *(_KEYS if file.partial else ())]):
            controls.append(read.filter(pc.is_in(read["op"], _CONTROLS)).select(_CONTROL))
            if file.partial:
                partial += pc.sum(read["partial"]).as_py() or 0
                moves += moves_as_texts(read).num_rows
    columns = {"controls": [to_ipc(pa.concat_tables(controls))], "partial": [partial], "moves": [moves]}
    return pa.RecordBatch.from_pydict(columns)


def _without_needless_images(images: pa.Table) -> pa.Table:
    """Return the rows with `before` only in tables without a key: the fold reads it nowhere else."""
    before = pc.if_else(pc.is_valid(images["key"]), pa.scalar(None, images["before"].type), images["before"])
    return images.set_column(images.column_names.index("before"), LOG_SCHEMA.field("before"), before)


def _divided(
    images: pa.Table, parts: int, moved: dict[tuple[int, str], int], *, only_latest: bool
) -> Iterator[pa.RecordBatch]:
    """Divide row images into parts; yield (part, rows). Rows without a key are not folded: any part may have them."""
    keyed, keyless = split_keyless(images)
    if only_latest:
        keyed = latest_per_key(keyed)
    for rows, part_of in (
        (keyed.drop_columns(["text"]), _parts_of_keys(keyed, parts, moved)),
        (keyless, keyless["position"].to_numpy() % parts),
    ):
        for part, numbers in split_by_part(part_of, parts):
            if len(numbers):
                stream = to_ipc(rows.take(numbers))
                yield pa.RecordBatch.from_pydict({"part": pa.array([part], pa.int32()), "rows": [stream]})


def _parts_of_keys(keyed: pa.Table, parts: int, moved: dict[tuple[int, str], int]) -> np.ndarray:
    relations = (keyed["relation"].to_numpy() & 0xFFFFFFFF).tolist()
    texts = keyed["text"].cast(pa.binary()).to_pylist()
    part_of = (np.fromiter(map(crc32, texts, relations), np.uint32, keyed.num_rows) % parts).astype(np.int64)
    if moved:
        keys = zip(keyed["relation"].to_pylist(), keyed["text"].to_pylist(), strict=True)
        for number, key in enumerate(keys):
            part_of[number] = moved.get(key, part_of[number])
    return part_of
