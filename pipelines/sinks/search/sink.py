"""Search sink: writes the tables of a sink into one tantivy index, with one commit per batch.

`apply` checks a batch and stores its rows in memory. `publish` writes these rows, the parked rows and the published
record in one commit of the index. So after a crash the index is as it was at the last publish, and the batch is applied
again.

The sink has the only writer of the index from `open` to `close`. The writer has a file lock (flock). The operating
system releases the lock when the process ends. So `open` fails for a second driver on the same machine.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import structlog
import tantivy

from cdc.config import DeadLetterSettings
from cdc.errors import MissingBase, SchemaNotApplicable, SinkFenced, SinkOfAnotherLog, SinkUnavailable
from cdc.failpoint import hit
from cdc.position import Position
from cdc.stores.dead_letter_rows import DeadLetterEntry, Image, Key, ParkedRow
from cdc.stores.search_index_reader import (
    OWNER_ID,
    PARKED_TOPIC,
    PUBLISHED_ID,
    decode_image,
    document_id,
    layout,
    parked_id,
    parked_rows,
    rows_of,
    stored_image,
)
from cdc.table import Column, TableSchema
from pipelines.sinks.contract import NONE_PARKED, Published, RefusedRow, TableBatch, TableRecord, TargetState
from pipelines.sinks.record_after_batch import applied_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WRITER_BYTES: Final = 64 * 1024 * 1024
"""Bytes that tantivy buffers before it writes a file; tantivy requires at least 15 MB per thread."""
KEEP_ATTEMPTS: Final = 20
"""Maximum attempts to link the files of the index for `pin`; an attempt fails if tantivy removes a file meanwhile."""
NO_ROWS: Final = pa.schema(
    [
        pa.field("op", pa.string()),
        pa.field("key", pa.list_(pa.string())),
        pa.field("position", pa.int64()),
        pa.field("ordinal", pa.int64()),
        pa.field("after", pa.map_(pa.int32(), pa.string())),
        pa.field("complete", pa.bool_()),
        pa.field("base", pa.list_(pa.string())),
    ]
).empty_table()
"""An empty table with the columns that this module reads, for a batch without rows (for example, only a truncate)."""
TEXT_TYPES: Final = frozenset({19, 25, 1042, 1043, 1009, 1015})
"""OIDs of the text types and their arrays, whose words can be searched. citext has no fixed OID; its name is used."""

log = structlog.get_logger("apply")


@dataclass(frozen=True, slots=True)
class PendingTable:
    """A batch of one table that `publish` will write: `publish` first deletes documents, then it adds rows."""

    schema: TableSchema
    upto: int
    erase_all: bool
    """Whether a truncate deletes all documents of the table."""
    erase_below: int | None
    """If a full copy ended in the batch, the position of its start; older documents are deleted. Otherwise None."""
    rows: pa.Table
    """The folded rows of the batch that the index does not have yet, with at least the columns of NO_ROWS."""
    completed: Mapping[int, Mapping[int, str | None] | None] = field(default_factory=dict)
    """Number of a row with a partial image → its complete image.

    None instead of an image means that the row is not written: a running full copy has not copied its base row yet.
    """


class SearchSink:
    """Implements pipelines.sinks.contract.ParkingSink; the target of all tables is one tantivy index.

    Applying a batch twice has the same effect as applying it once. The sink refuses tables without a key, because each
    document needs an id. The only rows that it parks are partial images without a base row. fields: names of the
    columns whose words can be searched; empty means every column of a text type. dead_letters: how many rows of a table
    may be parked.
    """

    parallel = 1
    """1, because a tantivy index has one writer."""
    parallel_from = 0

    def __init__(
        self, name: str, path: str | Path, fields: Sequence[str] = (), dead_letters: DeadLetterSettings = NONE_PARKED
    ) -> None:
        self.name = name
        self.parked = DeadLetterDocuments()
        self._path = Path(path)
        self._fields = frozenset(fields)
        self._dead_letters = dead_letters
        self._index: tantivy.Index | None = None
        self._writer: tantivy.IndexWriter | None = None
        self._record: bytes | None = None
        self._published: Published | None = None
        self._pending: dict[int, PendingTable] = {}

    def attach(self, spark: SparkSession) -> None:
        """Ignore the Spark session, because the driver alone writes the index."""

    def open(self, log_id: str) -> Published | None:
        """Open the index for writing and return its published record, None if nothing was published.

        Batches that were applied and not published are dropped. Raises SinkUnavailable if another process has the
        writer of the index, and SinkOfAnotherLog for an index of another log or with another layout.
        """
        self.close()
        self._path.mkdir(parents=True, exist_ok=True)
        try:
            self._index = tantivy.Index(layout(), str(self._path))
        except ValueError as error:
            raise SinkOfAnotherLog(f"search index {str(self._path)!r} cannot be opened for writing: {error}") from error
        self._writer = self._take_writer(self._index)
        try:
            self._claim(log_id)
        except BaseException:
            self.close()
            raise
        self._record = self._stored(PUBLISHED_ID)
        self._published = None if self._record is None else Published.from_json(self._record.decode())
        self.parked.load(self._stored_parked())
        return self._published

    def parking_limits(self, schema: TableSchema) -> DeadLetterSettings:
        """See ParkingSink.parking_limits. For a table without a key, no row is parked: `apply` refuses the table."""
        return self._dead_letters if schema.key else NONE_PARKED

    def image_mask(self, schema: TableSchema) -> Callable[[Image], Image]:  # noqa: ARG002 - an index hides nothing
        """See ParkingSink.image_mask."""
        return dict

    def keeps_history(self, schema: TableSchema) -> bool:  # noqa: ARG002 - an index has only current rows
        """See ParkingSink.keeps_history."""
        return False

    def target_position(self, schema: TableSchema) -> int:  # noqa: ARG002 - an index has nothing that was not published
        """See ParkingSink.target_position."""
        return 0

    def find_refused(self, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """Return the batch's partial images that have no base row. The list may be slightly longer than `limit`; see
        ParkingSink.
        """
        if batch.rows is None or batch.is_copying:
            return []
        without_base = (number for number, base in self._bases(batch.schema, batch.rows) if base is None)
        found = islice(without_base, limit + 1)
        return [RefusedRow(number, _no_base(batch.schema, batch.rows, number)) for number in found]

    def apply(self, batch: TableBatch) -> TableRecord:
        """Check the batch of one table, keep it in memory until `publish`, and return the table's new record.

        A batch changes nothing if the published position of the table is at or after the end of the batch. It also
        changes nothing if the table failed at a position before the start of the batch. In both cases the published
        record of the table is returned.

        Raises MissingBase for a partial image without a base row, and SchemaNotApplicable for a table without a key.
        After such an error the documents of the table do not change.
        """
        relation = batch.schema.relation
        current = self._published_record(relation)
        if current is not None and (current.position >= batch.upto or _refuses(current, batch)):
            return current
        self._pending.pop(relation, None)
        floor = current.position if current is not None else -1
        rows = self._new_rows(batch, floor)
        self._pending[relation] = PendingTable(
            schema=batch.schema,
            upto=batch.upto,
            erase_all=batch.truncated is not None and batch.truncated[0] > floor,
            erase_below=batch.generation,
            rows=rows,
            completed=self._complete(batch, rows),
        )
        return TableRecord(
            relation=relation,
            topic=batch.schema.topic,
            target=str(self._path),
            position=batch.upto,
            version=None,
            state=applied_state(batch, current, complete=True).value,
            schema=batch.schema.to_json().decode(),
        )

    def publish(self, record: Published) -> None:
        """Write the applied batches, their parked rows and the record in one commit of the index.

        A batch is not written if it ends after the position of its table in `record`. Raises SinkUnavailable if
        the commit fails; the index is then unchanged. Raises SinkFenced if another driver published.
        """
        writer = self._open_writer()
        self._open_index().reload()
        if self._stored(PUBLISHED_ID) != self._record:
            raise SinkFenced(
                f"another process published to search index {str(self._path)!r} after this process last read it"
            )
        content = record.to_json()
        with self._undone_on_error(writer):
            written = [pending for pending in self._pending.values() if _is_listed(record, pending)]
            for pending in written:
                self._write(writer, pending)
                self.parked.put(writer, pending.schema.relation)
            _replace_reserved(writer, PUBLISHED_ID, content)
            hit("search_before_commit")
            writer.commit()
        hit("search_after_commit")
        self._open_index().reload()
        self.parked.committed(pending.schema.relation for pending in written)
        self._pending.clear()
        self._record, self._published = content.encode(), record

    def pin(self, record: Published) -> str:
        """Keep the published cut readable; return the path of a directory with hard links to the files of the index."""
        cut = self._cuts / str(record.position)
        shutil.rmtree(cut, ignore_errors=True)
        for _ in range(KEEP_ATTEMPTS):
            shutil.rmtree(cut, ignore_errors=True)
            cut.mkdir(parents=True)
            if _linked(self._path, cut):
                return str(cut)
        raise SinkUnavailable(
            f"search index {str(self._path)!r} cannot keep the cut at {Position(record.position)!s} readable: "
            "in each attempt to link its files, tantivy removed one of them"
        )

    def release(self, handle: str) -> None:
        """Remove the directory of a pinned cut, if it still exists. handle: the result of `pin`."""
        shutil.rmtree(handle, ignore_errors=True)

    def close(self) -> None:
        """Release the writer of the index; applied batches that were not published are dropped."""
        self._pending.clear()
        if self._writer is not None:
            # rollback fails if the directory of the index was removed
            with suppress(ValueError, OSError):
                self._writer.rollback()
        # deleting the writer object releases its lock; tantivy-py has no other way
        self._writer = None
        self._index = None

    @property
    def _cuts(self) -> Path:
        return self._path.with_name(f"{self._path.name}.cuts")

    def _take_writer(self, index: tantivy.Index) -> tantivy.IndexWriter:
        try:
            return index.writer(heap_size=WRITER_BYTES, num_threads=1)
        except ValueError as error:
            raise SinkUnavailable(
                f"cannot lock search index {str(self._path)!r} for writing; another process probably has the lock: "
                f"{error}",
                remedy="stop the other apply process; this one then continues without a restart",
            ) from error

    def _open_writer(self) -> tantivy.IndexWriter:
        if self._writer is None:
            raise SinkUnavailable(f"sink {self.name!r} is not open")
        return self._writer

    def _open_index(self) -> tantivy.Index:
        if self._index is None:
            raise SinkUnavailable(f"sink {self.name!r} is not open")
        return self._index

    def _claim(self, log_id: str) -> None:
        owner = self._stored(OWNER_ID)
        if owner is None:
            writer = self._open_writer()
            _replace_reserved(writer, OWNER_ID, log_id)
            writer.commit()
            self._open_index().reload()
        elif owner.decode() != log_id:
            raise SinkOfAnotherLog(f"search index {str(self._path)!r} was written from another log: {owner.decode()!r}")

    def _stored(self, identity: str) -> bytes | None:
        index = self._open_index()
        return stored_image(index.searcher(), index.schema, identity)

    def _stored_parked(self) -> dict[int, dict[Key, ParkedRow]]:
        index = self._open_index()
        return {} if self._published is None else parked_rows(index.searcher(), index.schema, self._published)

    def _published_record(self, relation: int) -> TableRecord | None:
        return None if self._published is None else self._published.tables.get(relation)

    def _new_rows(self, batch: TableBatch, floor: int) -> pa.Table:
        rows = batch.rows
        if rows is None and batch.frame is not None:
            rows = batch.frame.toArrow()
        if rows is None:
            rows = NO_ROWS
        rows = rows.filter(self._are_new(batch.schema.relation, rows, floor))
        if rows["key"].null_count:
            raise SchemaNotApplicable(
                f"table {batch.schema.topic!r} has no key and cannot be indexed",
                remedy="add a primary key to the table, or exclude it from the sink's tables",
            )
        return rows

    def _are_new(self, relation: int, rows: pa.Table, floor: int) -> pa.ChunkedArray:
        """Return one bool per row: whether the sink must write the row.

        The sink must write each row after position `floor`, and each parked row that it tries again.
        """
        is_new, parked_by_key = pc.greater(rows["position"], floor), self.parked.rows_of(relation)
        if not parked_by_key or pc.all(is_new).as_py():
            return is_new
        places = zip(*(rows[c].to_pylist() for c in ("key", "position", "ordinal")), strict=True)
        parked = [
            key is not None and (row := parked_by_key.get(tuple(key))) is not None and row.place == tuple(place)
            for key, *place in places
        ]
        return pc.or_(is_new, pa.chunked_array([parked], pa.bool_()))

    def _bases(self, schema: TableSchema, rows: pa.Table) -> Iterator[tuple[int, bytes | None]]:
        """Yield (row number, stored image of its base row) for each partial image; the image is None if the index has
        no base row.
        """
        columns = zip(*(rows[c].to_pylist() for c in ("op", "complete", "key", "base")), strict=True)
        for number, (op, complete, key, base) in enumerate(columns):
            if op == "u" and not complete:
                yield number, self._stored(document_id(schema.relation, base if base is not None else key))

    def _complete(self, batch: TableBatch, rows: pa.Table) -> dict[int, dict[int, str | None] | None]:
        """Return row number → complete image, for each partial image.

        The image is None if a running full copy has not copied the base row yet. Raises MissingBase if no copy is
        running and the base row is missing.
        """
        schema, completed = batch.schema, dict[int, dict[int, str | None] | None]()
        for number, stored in self._bases(schema, rows):
            if stored is None and batch.is_copying:
                completed[number] = None
                continue
            if stored is None:
                raise _no_base(schema, rows, number)
            earlier = decode_image(stored)
            sent = dict(rows["after"][number].as_py() or [])
            completed[number] = {c.id: sent.get(c.id, earlier.get(c.id, c.missing)) for c in schema.sent}
        if waiting := sum(image is None for image in completed.values()):
            log.debug(
                "partial images are left out, because the running full copy will write their rows",
                table=schema.topic,
                images=waiting,
            )
        return completed

    @contextmanager
    def _undone_on_error(self, writer: tantivy.IndexWriter) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            writer.rollback()
            raise SinkUnavailable(
                f"cannot commit to search index {str(self._path)!r}: {error}",
                remedy="check free space and permissions of the index directory; the sink retries until it can commit",
            ) from error

    def _write(self, writer: tantivy.IndexWriter, pending: PendingTable) -> None:
        schema, relation = self._open_index().schema, pending.schema.relation
        if pending.erase_all:
            writer.delete_documents_by_query(rows_of(schema, relation))
        elif pending.erase_below is not None:
            writer.delete_documents_by_query(rows_of(schema, relation, below=pending.erase_below))
        searched = [c for c in pending.schema.sent if self._searched(c)]
        for number, row in enumerate(_rows(pending.rows)):
            image = pending.completed.get(number, dict(row["after"] or []))
            if image is None:
                continue
            writer.delete_documents_by_term("_id", document_id(relation, row["key"]))
            if row["op"] == "u":
                writer.add_document(_document(pending.schema, row, image, searched))

    def _searched(self, column: Column) -> bool:
        if self._fields:
            return column.name in self._fields
        return column.value_type[0] in TEXT_TYPES or column.type_name.rpartition(".")[2] == "citext"


def _is_listed(record: Published, pending: PendingTable) -> bool:
    """Return whether the record contains the batch's table, with a position at or after the end of the batch."""
    listed = record.tables.get(pending.schema.relation)
    return listed is not None and listed.position >= pending.upto


def _no_base(schema: TableSchema, rows: pa.Table, number: int) -> MissingBase:
    position = Position(rows["position"][number].as_py())
    return MissingBase(f"the target of table {schema.topic!r} has no base row for a partial image at {position}")


def _refuses(current: TableRecord, batch: TableBatch) -> bool:
    """Return whether the table failed at a position before the start of the batch."""
    return current.state == TargetState.FAILED and batch.after > current.position


def _rows(rows: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in rows.select(["op", "key", "position", "ordinal", "after"]).to_batches(max_chunksize=4096):
        yield from batch.to_pylist()


def _document(
    schema: TableSchema, row: Mapping[str, Any], image: Mapping[int, str | None], searched: Sequence[Column]
) -> tantivy.Document:
    document = tantivy.Document()
    document.add_text("_id", document_id(schema.relation, row["key"]))
    document.add_unsigned("_relation", schema.relation)
    document.add_text("_topic", schema.topic)
    document.add_bytes("_key", json.dumps(row["key"], ensure_ascii=False).encode())
    document.add_unsigned("_position", row["position"])
    document.add_unsigned("_ordinal", row["ordinal"])
    document.add_bytes("_image", json.dumps(dict(image), ensure_ascii=False).encode())
    texts = {c.name: text for c in searched if (text := image.get(c.id)) is not None}
    for text in texts.values():
        document.add_text("_text", text)
    # tantivy parses a text that begins like an RFC 3339 time, and panics if the time is out of its range
    document.add_json("_fields", {name: f" {text}" for name, text in texts.items()})
    return document


def _replace_reserved(writer: tantivy.IndexWriter, identity: str, content: str) -> None:
    writer.delete_documents_by_term("_id", identity)
    document = tantivy.Document()
    document.add_text("_id", identity)
    document.add_bytes("_image", content.encode())
    writer.add_document(document)


def _linked(index: Path, cut: Path) -> bool:
    """Link the committed files of the index into directory `cut`. Return False if tantivy removed a file during the
    linking.
    """
    meta = (index / "meta.json").read_bytes()
    segments = {segment["segment_id"].replace("-", "") for segment in json.loads(meta)["segments"]}
    try:
        for file in index.iterdir():
            if file.name.partition(".")[0] in segments:
                os.link(file, cut / file.name)
        (cut / "meta.json").write_bytes(meta)
        tantivy.Index.open(str(cut)).searcher()
    except (FileNotFoundError, ValueError):
        return False
    return True


class DeadLetterDocuments:
    """Implements pipelines.sinks.contract.ParkedRows: the parked rows of a search sink, as documents of its index.

    One commit of the index writes rows, published record and parked rows together. So changes of the parked rows stay
    in memory until SearchSink.publish calls `put`.
    """

    def __init__(self) -> None:
        self._stored: dict[int, Mapping[Key, ParkedRow]] = {}
        """Relation → its parked rows as the index has them."""
        self._parked: dict[int, Mapping[Key, ParkedRow]] = {}

    def load(self, stored: Mapping[int, Mapping[Key, ParkedRow]]) -> None:
        """Set the parked rows to those that the index stores; drop unpublished changes. stored: by relation and key."""
        self._stored, self._parked = dict(stored), dict(stored)

    def rows_of(self, relation: int) -> Mapping[Key, ParkedRow]:
        """See ParkedRows.rows_of."""
        return self._parked.get(relation, {})

    def write(self, relation: int, after: int, entries: Iterable[DeadLetterEntry]) -> None:
        """Do nothing, because the entries become durable in `publish`, together with the rows of the batch."""

    def confirm(self, relation: int, rows: Mapping[Key, ParkedRow]) -> None:
        """See ParkedRows.confirm."""
        self._parked[relation] = rows

    def put(self, writer: tantivy.IndexWriter, relation: int) -> None:
        """Add and delete documents, so that the next commit of `writer` stores exactly the parked rows of the table.

        The caller commits.
        """
        stored, parked = self._stored.get(relation, {}), self.rows_of(relation)
        for key in stored.keys() | parked.keys():
            row = parked.get(key)
            if row == stored.get(key):
                continue
            writer.delete_documents_by_term("_id", parked_id(relation, key))
            if row is not None:
                writer.add_document(_parked_document(row))

    def committed(self, relations: Iterable[int]) -> None:
        """Record that the commit with the parked rows of these tables succeeded."""
        self._stored |= {relation: self.rows_of(relation) for relation in relations}


def _parked_document(row: ParkedRow) -> tantivy.Document:
    document = tantivy.Document()
    document.add_text("_id", parked_id(row.relation, row.key))
    document.add_text("_topic", PARKED_TOPIC)
    document.add_bytes("_image", json.dumps(DeadLetterEntry(row).to_json(), ensure_ascii=False).encode())
    return document
