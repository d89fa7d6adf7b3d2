"""Writes the files of one run of `compacted` from files of the log, in this process or in Spark's workers.

In this process, narrow columns first decide which rows the run needs. The code calls these rows live, tombstones
included. For most keys only the latest row is live, so most rows are never read completely. The memory needed grows
with the number of keys, not of changes. Then the live rows are divided into parts, and each part is read, compacted and
written alone. Spark's workers do not look for live rows first: they divide all rows into parts.

Each part is compacted by the same function, so the run has the same rows wherever it is made. A writer that is killed
leaves files that no commit names.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.bucket_files import Root, as_root
from cdc.log.compacted_table import WrittenFile
from cdc.log.disk_format import ORDER, LogFile, delta_statistics
from cdc.log.file_selection import split
from cdc.log.reader import read_file, stream_file
from cdc.log.table_io import write_parquet
from cdc.log_row import LOG_SCHEMA, ROW_OPERATIONS, Operation
from cdc.position import Position
from pipelines.compaction.compact_rows import NARROW_COLUMNS, compact_rows, needed_row_numbers, remove_tombstones
from pipelines.compaction.keyless_netting import remove_cancelled_halves
from pipelines.folding.fold import split_keyless, split_partial
from pipelines.folding.key_parts import from_ipc, split_by_part, to_ipc
from pipelines.runtime.executor_code import raising_task_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPLIT_BYTES: Final = 8 << 20
"""Approximate log bytes that one Spark task reads; with small tasks, the last task ends soon after the others."""
OWN_FILE: Final = 64 << 20
"""Estimated Arrow bytes, over all parts, from which a relation gets files of its own instead of sharing a file."""
STEP: Final = 1_000_000
"""Number of rows whose narrow columns are examined at once, with 100 bytes of memory per row."""
READERS: Final = 2
"""Number of files that are read at once: one thread decodes while the other selects rows."""
FILE: Final = "file"
"""Name of the column with the index of a row's file in the list of log files."""
ROW: Final = "row"
"""Name of the column with the number of a row among those rows of its file that are in the range."""

_LIVE_SCHEMA: Final = pa.schema(
    [*(LOG_SCHEMA.field(name) for name in NARROW_COLUMNS), (FILE, pa.int32()), (ROW, pa.int64())]
)
_PARTITION_SCHEMA: Final = "part int, rows binary"
_FILE_SCHEMA: Final = "name string, rows long, size long, statistics string"
_FILE_ARROW: Final = pa.schema(
    [("name", pa.string()), ("rows", pa.int64()), ("size", pa.int64()), ("statistics", pa.string())]
)
_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))
_FENCES: Final = pa.array(["t", "g"])
_KEYS: Final = ["relation", "key", "old_key", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The plan of a run: its folder, its range of the log and its division into parts. Executors get it by pickle."""

    folder: str | Root
    """Folder of the run, which every executor can reach. The Delta log names the files as `FOLDER/NAME.parquet`."""
    after: int
    upto: int
    parts: int
    moved_parts: Mapping[tuple[int, str], int] = field(default_factory=dict)
    """(relation, key as one text) → part, for the keys that moves connect (see `key_parts`)."""
    bases: Mapping[int, bytes] = field(default_factory=dict)
    """Part → rows of older runs that complete partial images in the part, as an Arrow IPC stream."""
    tombstone_floor: int = -1
    """Position up to which tombstones are left out."""
    cancelled: bytes = b""
    """Cancelled halves of changes that are left out: an Arrow IPC stream with CANCELLED_SCHEMA; empty: none."""


def find_live_rows(files: Sequence[LogFile], after: Position, upto: Position, most: int) -> tuple[pa.Table, Position]:
    """Find the rows of (after, upto] that compact_rows() needs. Return (these rows, end of their range).

    The rows have the columns NARROW_COLUMNS, FILE and ROW. files: sorted by their first position. If more than `most`
    rows are needed, the range ends before `upto`, between two files that share no transaction.
    """
    live = _LIVE_SCHEMA.empty_table()
    waiting = list[pa.Table]()
    fresh = 0
    last = Position(0)
    for number, file in enumerate(files):
        last = max(last, file.last)
        for rows in _narrow_rows(file, number, after, upto):
            waiting.append(rows)
            fresh += rows.num_rows
            if fresh >= max(min(STEP, most), live.num_rows):
                live, waiting, fresh = _keep_live(live, waiting), [], 0
        if live.num_rows > most and number + 1 < len(files) and last < min(files[number + 1].first, upto):
            return _keep_live(live, waiting), last
    return _keep_live(live, waiting), upto


def _narrow_rows(file: LogFile, number: int, after: Position, upto: Position) -> Iterator[pa.Table]:
    begin = 0
    for rows in stream_file(file, after, upto, NARROW_COLUMNS):
        row_numbers = pa.arange(begin, begin + rows.num_rows)
        begin += rows.num_rows
        yield rows.append_column(FILE, pa.repeat(pa.scalar(number, pa.int32()), rows.num_rows)).append_column(
            ROW, row_numbers
        )


def _keep_live(live: pa.Table, waiting: Sequence[pa.Table]) -> pa.Table:
    rows = pa.concat_tables([live, *waiting]).combine_chunks()
    return rows.take(needed_row_numbers(rows)) if waiting else rows


def read_live_rows(files: Sequence[LogFile], live: pa.Table, after: Position, upto: Position) -> list[pa.Table]:
    """Read all columns (LOG_SCHEMA) of the rows that find_live_rows() returned, in the order of the files."""
    file_numbers, row_numbers = live[FILE].to_numpy(), live[ROW].to_numpy()
    wanted = {number: np.sort(row_numbers[file_numbers == number]) for number in np.unique(file_numbers).tolist()}

    def read(number: int) -> list[pa.Table]:
        return list(_select_rows(files[number], wanted[number], after, upto))

    with ThreadPoolExecutor(READERS) as readers:
        return [rows for parts in readers.map(read, wanted) for rows in parts]


def _select_rows(file: LogFile, row_numbers: np.ndarray, after: Position, upto: Position) -> Iterator[pa.Table]:
    begin = 0
    for rows in stream_file(file, after, upto, LOG_SCHEMA.names):
        low, high = np.searchsorted(row_numbers, (begin, begin + rows.num_rows)).tolist()
        if low < high:
            # a copy, so that the memory of the other rows is freed
            yield rows.take(pa.array(row_numbers[low:high] - begin))
        begin += rows.num_rows


def write_run(files: Sequence[LogFile], live: pa.Table, plan: RunPlan) -> list[WrittenFile]:
    """Write the run in this process, from the rows `live` of the files; memory contains one part at a time.

    live: as `find_live_rows` returns them. A part is a range in the order of the run, so most files are read for one
    part only.
    """
    written: list[WrittenFile] = []
    for part, own in _split_rows(live, plan, _neighbours):
        written += _compact_part(part, read_live_rows(files, own, Position(plan.after), Position(plan.upto)), plan)
    return written


def write_run_by_workers(spark: SparkSession, files: Sequence[LogFile], plan: RunPlan) -> list[WrittenFile]:
    """Write the run from the rows of the files, in Spark's workers; the memory of a worker contains one part."""
    groups = split(files, SPLIT_BYTES)

    def divide(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch["id"].to_pylist():
                rows = pa.concat_tables([_read(file, plan) for file in groups[number]])
                for part, own in _split_rows(rows, plan):
                    yield pa.RecordBatch.from_pydict({"part": pa.array([part], pa.int32()), "rows": [to_ipc(own)]})

    def write(divided: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        blobs = [(part, blob) for batch in divided for part, blob in zip(batch["part"], batch["rows"], strict=True)]
        if blobs:
            found = [from_ipc(blob.as_buffer()) for _, blob in blobs]
            written = _compact_part(blobs[0][0].as_py(), found, plan)
            yield pa.RecordBatch.from_pylist([asdict(file) for file in written], _FILE_ARROW)

    numbers = spark.range(0, len(groups), 1, len(groups))
    divided = numbers.mapInArrow(divide, _PARTITION_SCHEMA).repartitionById(plan.parts, "part")
    with raising_task_errors():
        return [WrittenFile(**row.asDict()) for row in divided.mapInArrow(write, _FILE_SCHEMA).collect()]


def bases_by_part(rows: pa.Table, plan: RunPlan) -> dict[int, bytes]:
    """Divide base rows of older runs into parts; return part → its rows as an Arrow IPC stream, as in RunPlan.bases."""
    return {part: to_ipc(own) for part, own in _split_rows(rows, plan)}


def _read(file: LogFile, plan: RunPlan) -> pa.Table:
    return read_file(file, Position(plan.after), Position(plan.upto))


def _split_rows(
    rows: pa.Table, plan: RunPlan, parts_of: Callable[[pa.Table, RunPlan], np.ndarray] | None = None
) -> Iterator[tuple[int, pa.Table]]:
    """Divide rows into parts; truncates and ends of full copies go to every part, schema rows to the first part."""
    if plan.parts == 1:
        yield 0, rows
        return
    is_row = pc.is_in(rows["op"], _ROWS)
    fences = rows.filter(pc.is_in(rows["op"], _FENCES))
    schemas = rows.filter(pc.equal(rows["op"], Operation.SCHEMA.value))
    images = rows if pc.all(is_row).as_py() else rows.filter(is_row)
    for part, numbers in split_by_part((parts_of or _parts_by_key)(images, plan), plan.parts):
        own = [images.take(numbers), fences, *([] if part else [schemas])]
        if any(rows.num_rows for rows in own):
            yield part, pa.concat_tables(own)


def _parts_by_key(images: pa.Table, plan: RunPlan) -> np.ndarray:
    """Return the part of each row: by key, or by position and ordinal for a row without a key."""
    text = pc.fill_null(pc.binary_join(images["key"], "\0"), "")
    relations = images["relation"].to_numpy()
    seeds = (relations & 0xFFFFFFFF).tolist()
    hashes = map(crc32, text.cast(pa.binary()).to_pylist(), seeds)
    found = np.fromiter(hashes, np.uint32, images.num_rows).astype(np.int64) % plan.parts
    keyless = pc.is_null(images["key"]).to_numpy()
    found[keyless] = (images["position"].to_numpy() + images["ordinal"].to_numpy())[keyless] % plan.parts
    if plan.moved_parts:
        moved = pc.is_in(text, pa.array({key for _, key in plan.moved_parts}, pa.string())).to_numpy()
        for number in np.flatnonzero(moved & ~keyless).tolist():
            found[number] = plan.moved_parts.get((int(relations[number]), text[number].as_py()), found[number])
    return found


def _neighbours(images: pa.Table, plan: RunPlan) -> np.ndarray:
    """Return the part of each row that the run needs; a part is a range of rows in the order of the run.

    Rows of keys with partial images are divided by the hash of their key instead.
    """
    ranks = np.empty(images.num_rows, np.int64)
    ranks[pc.sort_indices(images, ORDER).to_numpy()] = np.arange(images.num_rows)
    found = ranks * plan.parts // max(1, images.num_rows)
    keyed, _ = split_keyless(images.select(_KEYS).append_column("number", pa.arange(0, images.num_rows)))
    numbers = split_partial(keyed)[1]["number"].to_numpy()
    found[numbers] = _parts_by_key(images.take(pa.array(numbers)), plan)
    return found


def _compact_part(part: int, found: Sequence[pa.Table], plan: RunPlan) -> list[WrittenFile]:
    bases = [from_ipc(plan.bases[part])] if part in plan.bases else []
    rows = compact_rows(pa.concat_tables([LOG_SCHEMA.empty_table(), *found, *bases]), plan.after)
    if part:
        rows = rows.filter(pc.is_in(rows["op"], _ROWS))
    rows = remove_tombstones(rows, plan.tombstone_floor)
    if plan.cancelled:
        rows = remove_cancelled_halves(rows, from_ipc(plan.cancelled))
    return [_write_file(own, plan) for own in split_into_files(rows, plan.parts)]


def split_into_files(rows: pa.Table, parts: int) -> Iterator[pa.Table]:
    """Divide the rows of one part into one table per file: the schema rows, each large relation, and all other rows.

    Schema rows have a file of their own, because readers often need only schema rows. parts: number of parts of the
    run, from which the size of a relation in the whole run is estimated.
    """
    is_schema = pc.equal(rows["op"], Operation.SCHEMA.value)
    yield from _unless_empty(rows.filter(is_schema))
    rows = rows.filter(pc.invert(is_schema))
    if rows.nbytes * parts < OWN_FILE:
        yield from _unless_empty(rows)
        return
    small = [rows.slice(0, 0)]
    _, starts, counts = np.unique(rows["relation"].to_numpy(), return_index=True, return_counts=True)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        own = rows.slice(start, count)
        if own.nbytes * parts < OWN_FILE:
            small.append(own)
        else:
            yield own
    yield from _unless_empty(pa.concat_tables(small))


def _unless_empty(rows: pa.Table) -> Iterator[pa.Table]:
    if rows.num_rows:
        yield rows


def _write_file(rows: pa.Table, plan: RunPlan) -> WrittenFile:
    folder = as_root(plan.folder)
    path = folder / f"{uuid.uuid4().hex}.parquet"
    size = write_parquet(rows, path)
    return WrittenFile(f"{folder.name}/{path.name}", rows.num_rows, size, delta_statistics(rows))
