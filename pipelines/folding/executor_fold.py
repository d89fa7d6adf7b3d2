"""The fold by executors: a large range of the log is read and folded by Spark's executors, and stays there.

1. A survey reads narrow columns of the files that have control rows or partial images. The driver gets the control
   rows, and the number of partial images.
2. Executors read the log again, group of files by group of files, and divide the rows into parts by key. Without
   partial images, a group keeps only the latest row of each key.
3. One task for each part folds its rows with `fold`, the specification. So the result is that of the driver's fold.
   Changes of tables with history are not folded: a part has every change of its keys.
4. The folded rows stay on the executors' disks as `FoldedParts`. The driver gets the numbers of rows of each piece.

Partial images that move rows to other keys connect the keys, and connected keys are in one part. The driver needs
these keys for that. With more than MAX_MOVES of them, `spark_fold` folds the range instead. The changes of tables with
history are then divided separately, or each such table is in one part if it has too many of these keys itself.

So the driver gets control rows, at most MAX_MOVES moved keys, and numbers of pieces: no row images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.disk_format import LogFile
from cdc.log.file_selection import TableSelection, split_evenly
from cdc.log.reader import stream_file
from cdc.log_row import LOG_SCHEMA, ROW_OPERATIONS, Operation
from cdc.position import Position
from pipelines.folding.fences_and_statistics import Fence, add_fences, addressed_to, fence_rows, is_fenced
from pipelines.folding.fold import FOLDED_ARROW, filter_rows, latest_per_key, split_keyless
from pipelines.folding.folded_parts import (
    PIECES,
    FoldedParts,
    FoldedTable,
    collect_images,
    pieces_of,
    sum_by_table,
)
from pipelines.folding.history_changes import fold_with_history, is_late, single_changes
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

SPLIT_BYTES: Final = 16 << 20
"""Approximate log bytes that one Spark task reads: a second of work on a core.

With small tasks, the last one ends soon after the others. But each task costs something whatever it reads.
"""
PART_ROWS: Final = 500_000
"""Approximate log rows of one part; folding them takes a worker half a second and several hundred bytes per row."""
HISTORY_PART_ROWS: Final = 150_000
"""Approximate log rows of one part if the sink keeps history of a table: a task has all changes of a part in memory, as
texts and as typed columns, and the rows of the target that they change.
"""
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

_MovedKeys = dict[tuple[int, str], int]
"""(relation, key as one text) → part, of the keys that partial images connect."""


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
    only_kept: bool = False
    """Whether `read_images` leaves out all other relations than `kept`."""

    @property
    def history(self) -> LogRange:
        """The range with the relations whose history the sink keeps only."""
        return replace(self, only_kept=True)

    def read(self, files: Sequence[LogFile], columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of some files that are for the sink, with the given columns and `address`."""
        for file in files:
            for rows in stream_file(file, self.after, self.upto, columns, self.tables):
                yield filter_rows(rows, addressed_to(rows["address"], self.sink))

    def has_control(self, file: LogFile) -> bool:
        """Return whether a file has control rows, of any table; reads little of it."""
        operations = stream_file(file, self.after, self.upto, ["op"])
        return any(pc.any(pc.is_in(rows["op"], _CONTROLS)).as_py() for rows in operations)

    def read_images(self, files: Sequence[LogFile], fences: dict[int, Fence]) -> Iterator[pa.Table]:
        """Yield the row images of some files that a fold needs, in tables of about READ_ROWS rows."""
        read: list[pa.Table] = []
        for rows in self.read(files, _FOLDED):
            images = filter_rows(rows, pc.is_in(rows["op"], _ROWS))
            if self.only_kept:
                images = images.filter(pc.is_in(images["relation"], pa.array(sorted(self.kept), pa.int64())))
            single = self.is_single(images)
            if fences:
                is_needed = pc.or_(single, pc.invert(is_fenced(images, fences)))
                images, single = images.filter(is_needed), single.filter(is_needed)
            read.append(_without_needless_images(images, single))
            if sum(table.num_rows for table in read) >= READ_ROWS:
                yield pa.concat_tables(read)
                read = []
        if read:
            yield pa.concat_tables(read)

    def fences(self, controls: pa.Table) -> dict[int, Fence]:
        """Return relation → its fence, for each relation in which a truncate or a finished full copy removes rows.

        controls: the control rows of the range. Those after `since` remove no row from a history.
        """
        fences: dict[int, Fence] = {}
        add_fences(fences, fence_rows(controls.filter(pc.invert(is_late(controls, self.kept, self.since)))))
        return fences

    def is_single(self, images: pa.Table) -> pa.ChunkedArray:
        """Return one bool per row image: whether it is a change that is not folded."""
        if self.kept:
            return single_changes(images, self.kept, self.since)
        return pa.chunked_array([pa.array(np.zeros(images.num_rows, bool))])

    def fold(self, images: pa.Table) -> pa.Table:
        """Fold all row images of some keys to FOLDED_ARROW rows."""
        return fold_with_history(images, self.kept, self.since, sink=self.sink)


@dataclass(frozen=True, slots=True)
class Survey:
    """What the driver must know of a range before it is folded."""

    controls: pa.Table
    """Schema changes, truncates and ends of full copies, in any order."""
    partial: int
    """Number of partial images."""
    moves: int
    """Number of partial images that move a row to another key."""
    kept_moves: int
    """The same number, of relations whose history the sink keeps only."""


@dataclass
class ExecutorFold:
    """One range of the log that executors fold, until `release`."""

    session: SparkSession
    rows: LogRange
    parts: int = 0
    """Number of parts into which the keys are divided; 0: by the size of the files and the cores of the executors."""
    max_moves: int = MAX_MOVES
    groups: list[list[LogFile]] = field(init=False, repr=False)
    """The files that each task reads."""
    _stored: list[DataFrame] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        files = self.rows.files
        part_rows = HISTORY_PART_ROWS if self.rows.kept else PART_ROWS
        rows = sum(file.rows for file in files)
        size = sum(file.size for file in files)
        cores = self.session.sparkContext.defaultParallelism
        parts = max(1, -(-rows // part_rows), -(-size // PART_BYTES))
        self.parts = self.parts or in_full_rounds(parts, cores)
        self.groups = split_evenly(files, in_full_rounds(max(1, -(-size // SPLIT_BYTES)), cores))

    @cached_property
    def survey(self) -> Survey:
        """The survey of the range; the first access runs a Spark job."""
        groups, rows = self.groups, self.rows

        def count(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for number in _numbers(numbers):
                yield _surveyed(rows, groups[number])

        columns = "controls binary, partial long, moves long, kept_moves long"
        found = self._tasks().mapInArrow(count, columns).collect()
        controls = [from_ipc(bytes(row["controls"])) for row in found]
        return Survey(
            pa.concat_tables([_CONTROL_SCHEMA.empty_table(), *controls]),
            sum(row["partial"] for row in found),
            sum(row["moves"] for row in found),
            sum(row["kept_moves"] for row in found),
        )

    @property
    def is_divisible(self) -> bool:
        """Whether the driver can know which keys partial images connect; otherwise `spark_fold` folds the range."""
        return self.survey.moves <= self.max_moves

    def fold(self) -> list[FoldedTable]:
        """Fold the range, and store the folded rows on the executors; return their numbers by table."""
        return self.store(self._folded(self.rows, self._moved_parts(self.rows)))

    def pieces_of_history(self) -> DataFrame:
        """Return the changes of the tables with history as a frame with the columns PIECES, for a range that is not
        divisible.
        """
        rows, moved = self.rows.history, None
        if self.survey.kept_moves <= self.max_moves:
            moved = self._moved_parts(rows)
        return self._folded(rows, moved)

    def store(self, pieces: DataFrame) -> list[FoldedTable]:
        """Store a frame with the columns PIECES on the executors; return its numbers by table."""
        from pyspark import StorageLevel

        stored = pieces.persist(StorageLevel.DISK_ONLY)
        self._stored.append(stored)
        # Spark would need another stage to add up these few rows, and code for it in every JVM: a second at first
        return sum_by_table(row.asDict() for row in stored.drop("part", "images").collect())

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

    def _folded(self, rows: LogRange, moved: _MovedKeys | None) -> DataFrame:
        """Return the folded rows as a frame with the columns PIECES. moved: as in `_parts_of_keys`."""
        groups, parts = self.groups, self.parts
        fences, only_latest = rows.fences(self.survey.controls), not self.survey.partial

        def divide(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for number in _numbers(numbers):
                for images in rows.read_images(groups[number], fences):
                    keyed, keyless = split_keyless(images)
                    if only_latest:
                        keyed = _latest_or_single(keyed, rows.is_single(keyed))
                    yield from _divided(keyed, keyless, parts, moved)

        def fold_part(received: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            part, read = 0, []
            for batch in received:
                part = batch["part"][0].as_py()
                read += [from_ipc(stream.as_buffer()) for stream in batch["rows"]]
            if read:
                yield from pieces_of(part, rows.fold(pa.concat_tables(read)))

        divided = self._tasks().mapInArrow(divide, "part int, rows binary")
        return divided.repartitionById(parts, "part").mapInArrow(fold_part, PIECES)

    def _moved_parts(self, rows: LogRange) -> _MovedKeys:
        return parts_of_moved_keys(self._moves(rows), self.parts)

    def _moves(self, rows: LogRange) -> pa.Table:
        if not self.survey.moves:
            return MOVE_SCHEMA.empty_table()
        groups = self.groups

        def find(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            columns = ["relation", "partial", "address", *_KEYS]
            for number in _numbers(numbers):
                with_partial = [file for file in groups[number] if file.partial]
                for read in rows.read(with_partial, columns):
                    moves = moves_as_texts(read)
                    if rows.only_kept:
                        moves = _of_relations(moves, rows.kept)
                    if moves.num_rows:
                        yield pa.RecordBatch.from_pydict({"moves": [to_ipc(moves)]})

        found = [from_ipc(bytes(row["moves"])) for row in self._tasks().mapInArrow(find, "moves binary").collect()]
        return pa.concat_tables([MOVE_SCHEMA.empty_table(), *found])

    def _tasks(self) -> DataFrame:
        return self.session.range(0, len(self.groups), 1, max(1, len(self.groups)))


def in_full_rounds(tasks: int, cores: int) -> int:
    """Return the number of tasks, increased so that in the last round of a stage every core has a task."""
    return tasks if tasks <= cores else -(-tasks // cores) * cores


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
    controls = [_CONTROL_SCHEMA.empty_table()]
    partial = moves = kept_moves = 0
    for file in files:
        if not (file.partial or rows.has_control(file)):
            continue
        for read in rows.read([file], [*_SURVEYED, *(_KEYS if file.partial else ())]):
            controls.append(read.filter(pc.is_in(read["op"], _CONTROLS)).select(_CONTROL))
            if file.partial:
                partial += pc.sum(read["partial"]).as_py() or 0
                found = moves_as_texts(read)
                moves += found.num_rows
                kept_moves += _of_relations(found, rows.kept).num_rows
    numbers = {"partial": [partial], "moves": [moves], "kept_moves": [kept_moves]}
    return pa.RecordBatch.from_pydict({"controls": [to_ipc(pa.concat_tables(controls))], **numbers})


def _of_relations(rows: pa.Table, relations: AbstractSet[int]) -> pa.Table:
    return rows.filter(pc.is_in(rows["relation"], pa.array(sorted(relations), pa.int64())))


def _without_needless_images(images: pa.Table, single: pa.ChunkedArray) -> pa.Table:
    """Return the rows with `before` only in tables without a key, and in single deletes: nothing else reads it."""
    is_read = pc.or_(pc.is_null(images["key"]), pc.and_(single, pc.equal(images["op"], Operation.DELETE.value)))
    if pc.any(is_read, min_count=0).as_py():
        before = pc.if_else(is_read, images["before"], pa.scalar(None, images["before"].type))
    else:  # the usual case; `if_else` of maps takes longer than anything else here
        before = pa.nulls(images.num_rows, images["before"].type)
    return images.set_column(images.column_names.index("before"), LOG_SCHEMA.field("before"), before)


def _latest_or_single(keyed: pa.Table, single: pa.ChunkedArray) -> pa.Table:
    """Return the latest row of each key, and all rows that are not folded."""
    latest = latest_per_key(filter_rows(keyed, pc.invert(single)))
    return pa.concat_tables([latest, keyed.filter(single)]) if pc.any(single).as_py() else latest


def _divided(keyed: pa.Table, keyless: pa.Table, parts: int, moved: _MovedKeys | None) -> Iterator[pa.RecordBatch]:
    """Divide row images into parts; yield (part, rows). Rows without a key are not folded: any part may have them."""
    for rows, part_of in (
        (keyed.drop_columns(["text"]), _parts_of_keys(keyed, parts, moved)),
        (keyless, keyless["position"].to_numpy() % parts),
    ):
        for part, numbers in split_by_part(part_of, parts):
            if len(numbers):
                stream = to_ipc(rows.take(numbers))
                yield pa.RecordBatch.from_pydict({"part": pa.array([part], pa.int32()), "rows": [stream]})


def _parts_of_keys(keyed: pa.Table, parts: int, moved: _MovedKeys | None) -> np.ndarray:
    """Return the number of the part of each row.

    moved: the parts of keys that partial images connect. None: all keys of a relation may be connected, and get the
    same part.
    """
    if moved is None:
        return keyed["relation"].to_numpy() % parts
    relations = (keyed["relation"].to_numpy() & 0xFFFFFFFF).tolist()
    texts = keyed["text"].cast(pa.binary()).to_pylist()
    part_of = (np.fromiter(map(crc32, texts, relations), np.uint32, keyed.num_rows) % parts).astype(np.int64)
    if moved:
        keys = zip(keyed["relation"].to_pylist(), keyed["text"].to_pylist(), strict=True)
        for number, key in enumerate(keys):
            part_of[number] = moved.get(key, part_of[number])
    return part_of
