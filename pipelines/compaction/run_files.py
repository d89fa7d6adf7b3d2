"""Run files: files of the log → the files of one run, part by part here or by Spark's workers, no row ever in the JVM.

Rows are dealt into parts by a hash of relation and key, keys that moves connect into the same one. Each part is
compacted by itself, with the same function wherever that happens, so the run is the same whoever made it.
A killed one leaves files that belong to no table.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import LOG_SCHEMA, ROW_OPERATIONS, Operation
from cdc.log.compacted_state import WrittenFile
from cdc.log.layout import ORDER, LogFile, delta_statistics
from cdc.log.object_path import Root, as_root
from cdc.log.ranges import split
from cdc.log.reader import read_file
from cdc.log.storage import write_parquet
from cdc.position import Position
from pipelines.compaction.compact_rows import compacted, without_tombstones
from pipelines.compaction.keyless_netting import without_cancelled
from pipelines.compaction.live_rows import whole
from pipelines.compaction.row_partitions import opened, packed, places_by_part
from pipelines.folding.fold import split_keyless, split_partial
from pipelines.runtime.worker_errors import worker_error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPLIT_BYTES: Final = 8 << 20
"""Log bytes of one task: small enough that the last one does not keep the others waiting."""
OWN_FILE: Final = 64 << 20
"""Bytes of a relation, as Arrow over all parts, from which on it shares its files with no other."""
_DEALT: Final = "part int, rows binary"
_WRITTEN: Final = "name string, rows long, size long, statistics string"
_MADE: Final = pa.schema(
    [("name", pa.string()), ("rows", pa.int64()), ("size", pa.int64()), ("statistics", pa.string())]
)
_ROWS: Final = pa.array(sorted(ROW_OPERATIONS))
_FENCES: Final = pa.array(["t", "g"])
_KEYS: Final = ["relation", "key", "old_key", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """What is to be made of the files; pickled to executors."""

    folder: str | Root
    """Of the run, which every executor sees; its name begins the files' names."""
    after: int
    upto: int
    parts: int
    together: Mapping[tuple[int, str], int] = field(default_factory=dict)
    """(relation, key) → part, of keys that moves connect."""
    bases: Mapping[int, bytes] = field(default_factory=dict)
    """Part → rows of older runs that complete what moved, as a blob."""
    forget: int = -1
    """Deletes up to this position are left out."""
    cancelled: bytes = b""
    """Halves of rows that are left out, as `keyless_netting` has them, as a blob; nothing if empty."""


def run_files(files: Sequence[LogFile], found: pa.Table, order: RunOrder) -> list[WrittenFile]:
    """Make the run in this process of survivors of the files, of which one part is in memory at a time.

    Parts are neighbours in the order of the run, so that of most files each is read for one part alone.
    """
    made: list[WrittenFile] = []
    for part, own in _dealt(found, order, _neighbours):
        made += _made(part, whole(files, own, Position(order.after), Position(order.upto)), order)
    return made


def run_files_by_workers(spark: SparkSession, files: Sequence[LogFile], order: RunOrder) -> list[WrittenFile]:
    """Make the run in Spark's workers, each of which holds one part in memory."""
    groups = split(files, SPLIT_BYTES)

    def deal(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch["id"].to_pylist():
                rows = pa.concat_tables([_read(file, order) for file in groups[number]])
                for part, own in _dealt(rows, order):
                    yield pa.RecordBatch.from_pydict({"part": pa.array([part], pa.int32()), "rows": [packed(own)]})

    def write(dealt: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        blobs = [(part, blob) for batch in dealt for part, blob in zip(batch["part"], batch["rows"], strict=True)]
        if blobs:
            found = [opened(blob.as_buffer()) for _, blob in blobs]
            made = _made(blobs[0][0].as_py(), found, order)
            yield pa.RecordBatch.from_pylist([asdict(file) for file in made], _MADE)

    numbers = spark.range(0, len(groups), 1, len(groups))
    dealt = numbers.mapInArrow(deal, _DEALT).repartitionById(order.parts, "part")
    with _told_by_workers():
        return [WrittenFile(**row.asDict()) for row in dealt.mapInArrow(write, _WRITTEN).collect()]


@contextmanager
def _told_by_workers() -> Iterator[None]:
    """A file that a worker could not read is the same error here, where Spark hands on only its text."""
    # late: who has no Spark does not wait for it
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as exc:
        if (unread := worker_error(exc)) is None:
            raise
        raise unread from exc


def bases_by_part(rows: pa.Table, order: RunOrder) -> dict[int, bytes]:
    """Rows of older runs as Order.bases holds them."""
    return {part: packed(own) for part, own in _dealt(rows, order)}


def _read(file: LogFile, order: RunOrder) -> pa.Table:
    return read_file(file, Position(order.after), Position(order.upto))


def _dealt(
    rows: pa.Table, order: RunOrder, parts_of: Callable[[pa.Table, RunOrder], np.ndarray] | None = None
) -> Iterator[tuple[int, pa.Table]]:
    """The rows by part; what ends rows of a relation goes to every part, the other controls to the first."""
    if order.parts == 1:
        yield 0, rows
        return
    is_row = pc.is_in(rows["op"], _ROWS)
    fences = rows.filter(pc.is_in(rows["op"], _FENCES))
    schemas = rows.filter(pc.equal(rows["op"], Operation.SCHEMA.value))
    images = rows if pc.all(is_row).as_py() else rows.filter(is_row)
    for part, places in places_by_part((parts_of or _parts_of)(images, order), order.parts):
        own = [images.take(places), fences, *([] if part else [schemas])]
        if any(rows.num_rows for rows in own):
            yield part, pa.concat_tables(own)


def _parts_of(images: pa.Table, order: RunOrder) -> np.ndarray:
    """The part of each row, as pipelines.compaction.key_changes.part_of has it; rows without a key by their place."""
    text = pc.fill_null(pc.binary_join(images["key"], "\0"), "")
    relations = images["relation"].to_numpy()
    seeds = (relations & 0xFFFFFFFF).tolist()
    hashes = map(crc32, text.cast(pa.binary()).to_pylist(), seeds)
    found = np.fromiter(hashes, np.uint32, images.num_rows).astype(np.int64) % order.parts
    keyless = pc.is_null(images["key"]).to_numpy()
    found[keyless] = (images["position"].to_numpy() + images["ordinal"].to_numpy())[keyless] % order.parts
    if order.together:
        connected = pc.is_in(text, pa.array({key for _, key in order.together}, pa.string())).to_numpy()
        for place in np.flatnonzero(connected & ~keyless).tolist():
            found[place] = order.together.get((int(relations[place]), text[place].as_py()), found[place])
    return found


def _neighbours(images: pa.Table, order: RunOrder) -> np.ndarray:
    """The part of each of the rows that survive; those of keys with partial images come together, wherever they are."""
    ranks = np.empty(images.num_rows, np.int64)
    ranks[pc.sort_indices(images, ORDER).to_numpy()] = np.arange(images.num_rows)
    found = ranks * order.parts // max(1, images.num_rows)
    keyed, _ = split_keyless(images.select(_KEYS).append_column("number", pa.arange(0, images.num_rows)))
    places = split_partial(keyed)[1]["number"].to_numpy()
    found[places] = _parts_of(images.take(pa.array(places)), order)
    return found


def _made(part: int, found: Sequence[pa.Table], order: RunOrder) -> list[WrittenFile]:
    bases = [opened(order.bases[part])] if part in order.bases else []
    rows = compacted(pa.concat_tables([LOG_SCHEMA.empty_table(), *found, *bases]), order.after)
    if part:
        rows = rows.filter(pc.is_in(rows["op"], _ROWS))
    rows = without_tombstones(rows, order.forget)
    if order.cancelled:
        rows = without_cancelled(rows, opened(order.cancelled))
    return [_written(own, order) for own in apart(rows, order.parts)]


def apart(rows: pa.Table, parts: int) -> Iterator[pa.Table]:
    """The rows of each file: schemas, which are looked for on their own, each large relation, and the rest."""
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


def _written(rows: pa.Table, order: RunOrder) -> WrittenFile:
    folder = as_root(order.folder)
    path = folder / f"{uuid.uuid4().hex}.parquet"
    size = write_parquet(rows, path)
    return WrittenFile(f"{folder.name}/{path.name}", rows.num_rows, size, delta_statistics(rows))
