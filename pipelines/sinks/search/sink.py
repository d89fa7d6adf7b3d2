"""SearchSink: one tantivy index per sink, one commit per batch.

`apply` reads and checks, and keeps what it will write in memory; `publish` writes rows, what is parked, and record
in one commit of the index. So a crash anywhere leaves the index as it was at the last publication, and a
batch may be applied again, shorter or longer, without a trace of the first try.

Fence: the writer is held from `open` to `close`. Its lock is the operating system's (flock), so it goes
with the process, kill -9 included, and a second driver on the machine is refused at `open`.
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
from cdc.stores.search_index import (
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
from pipelines.sinks.table_records import applied_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WRITER_BYTES: Final = 64 * 1024 * 1024
"""tantivy's buffer before it writes a segment; its smallest is 15 MB per thread."""
KEEP_ATTEMPTS: Final = 20
"""Merges may remove files while they are being linked; each attempt starts from the index's newest state."""
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
"""The columns of a folded row that are read here, for a batch of control rows only."""
TEXT_TYPES: Final = frozenset({19, 25, 1042, 1043, 1009, 1015})
"""name, text, char, varchar, text[], varchar[]; citext has no fixed OID and is known by its name."""

log = structlog.get_logger("apply")


@dataclass(frozen=True, slots=True)
class PendingTable:
    """What one table's batch will write: deletions first, then the rows."""

    schema: TableSchema
    upto: int
    erase_all: bool
    erase_below: int | None
    rows: pa.Table
    """FOLDED_ARROW, only rows the index does not have yet."""
    completed: Mapping[int, Mapping[int, str | None] | None] = field(default_factory=dict)
    """Row number → whole image, for rows whose image came without its unchanged TOAST columns; None: no row."""


class SearchSink:
    """A Sink (pipelines/sinks/contract.py) whose target is a tantivy index.

    Effectively once: rows are placed by key and table position. Tables without a key are refused, for
    a document needs a name; the one row that is refused alone is a partial image whose base is not there.
    `fields` are the columns whose words can be searched; empty means every column of a text type.
    `dead_letters` says how much of a table may be parked.
    """

    parallel = 1
    """An index has one writer."""

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
        """Nothing: an index is written on the driver alone."""

    def open(self, log_id: str) -> Published | None:
        """Take the writer and return the record of the last publication; what was applied after it is forgotten.

        Raises SinkUnavailable while another driver holds the index, SinkOfAnotherLog for an index
        of another log or another layout.
        """
        self.close()
        self._path.mkdir(parents=True, exist_ok=True)
        try:
            self._index = tantivy.Index(layout(), str(self._path))
        except ValueError as error:
            raise SinkOfAnotherLog(f"search index {str(self._path)!r} was created with another layout") from error
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
        """See ParkingSink.parking_limits; a table without a key stops as a whole."""
        return self._dead_letters if schema.key else NONE_PARKED

    def image_mask(self, schema: TableSchema) -> Callable[[Image], Image]:  # noqa: ARG002 - an index hides nothing
        """See ParkingSink.image_mask."""
        return dict

    def keeps_history(self, schema: TableSchema) -> bool:  # noqa: ARG002 - an index holds rows of now
        """See ParkingSink.keeps_history."""
        return False

    def target_position(self, schema: TableSchema) -> int:  # noqa: ARG002 - an index has nothing that was not published
        """See ParkingSink.target_position."""
        return 0

    def find_refused(self, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """See ParkingSink.find_refused: of texts an index takes every one, so these are the rows without a base."""
        if batch.rows is None or batch.is_copying:
            return []
        lacking = (number for number, base in self._bases(batch.schema, batch.rows) if base is None)
        found = islice(lacking, limit + 1)
        return [RefusedRow(number, _no_base(batch.schema, batch.rows, number)) for number in found]

    def apply(self, batch: TableBatch) -> TableRecord:
        """Check and remember one table's batch; a table that already stands at its end is left alone.

        Raises MissingBase for a row whose unsent columns the index does not have, SchemaNotApplicable for
        a table without a key; both concern this table alone, whose documents then stay as they are.
        Several tables may be applied at once, from several threads.
        """
        relation = batch.schema.relation
        stands = self._stands(relation)
        if stands is not None and (stands.position >= batch.upto or _refuses(stands, batch)):
            return stands
        self._pending.pop(relation, None)
        floor = stands.position if stands is not None else -1
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
            state=applied_state(batch, stands, complete=True).value,
            schema=batch.schema.to_json().decode(),
        )

    def publish(self, record: Published) -> None:
        """Write what was applied and the record in one commit.

        A table that the record does not list at its new position was given up by the driver: its rows
        are not written. Raises SinkUnavailable, and the index is then as before.
        """
        writer = self._held_writer()
        self._held_index().reload()
        if self._stored(PUBLISHED_ID) != self._record:
            raise SinkFenced(f"another driver published to the search index {str(self._path)!r}")
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
        self._held_index().reload()
        self.parked.committed(pending.schema.relation for pending in written)
        self._pending.clear()
        self._record, self._published = content.encode(), record

    def pin(self, record: Published) -> str:
        """Make the last publication readable later; returns the directory of its hard-linked copy."""
        cut = self._cuts / str(record.position)
        shutil.rmtree(cut, ignore_errors=True)
        for _ in range(KEEP_ATTEMPTS):
            shutil.rmtree(cut, ignore_errors=True)
            cut.mkdir(parents=True)
            if _linked(self._path, cut):
                return str(cut)
        raise SinkUnavailable(
            f"search index {str(self._path)!r} cannot keep the cut at {record.position!r}: the files keep changing"
        )

    def release(self, handle: str) -> None:
        """Forget a kept cut; one that is gone already is fine."""
        shutil.rmtree(handle, ignore_errors=True)

    def close(self) -> None:
        """Give the writer back; what was applied and not published is forgotten."""
        self._pending.clear()
        if self._writer is not None:
            # an index that was removed under its driver has nothing to go back to
            with suppress(ValueError, OSError):
                self._writer.rollback()
        # the lock goes with the writer object: tantivy-py has no other way to release it
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
                f"the search index {str(self._path)!r} cannot be written: another process may be writing to it",
                remedy="stop the other apply process; this one then continues without a restart",
            ) from error

    def _held_writer(self) -> tantivy.IndexWriter:
        if self._writer is None:
            raise SinkUnavailable(f"sink {self.name!r} is not open")
        return self._writer

    def _held_index(self) -> tantivy.Index:
        if self._index is None:
            raise SinkUnavailable(f"sink {self.name!r} is not open")
        return self._index

    def _claim(self, log_id: str) -> None:
        owner = self._stored(OWNER_ID)
        if owner is None:
            writer = self._held_writer()
            _replace_reserved(writer, OWNER_ID, log_id)
            writer.commit()
            self._held_index().reload()
        elif owner.decode() != log_id:
            raise SinkOfAnotherLog(f"search index {str(self._path)!r} was written from another log, {owner.decode()!r}")

    def _stored(self, identity: str) -> bytes | None:
        index = self._held_index()
        return stored_image(index.searcher(), index.schema, identity)

    def _stored_parked(self) -> dict[int, dict[Key, ParkedRow]]:
        index = self._held_index()
        return {} if self._published is None else parked_rows(index.searcher(), index.schema, self._published)

    def _stands(self, relation: int) -> TableRecord | None:
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
        """Which rows the index does not have: those behind the floor, and parked ones that are tried again."""
        behind, held = pc.greater(rows["position"], floor), self.parked.rows_of(relation)
        if not held or pc.all(behind).as_py():
            return behind
        places = zip(*(rows[c].to_pylist() for c in ("key", "position", "ordinal")), strict=True)
        parked = [
            key is not None and (row := held.get(tuple(key))) is not None and row.place == tuple(place)
            for key, *place in places
        ]
        return pc.or_(behind, pa.chunked_array([parked], pa.bool_()))

    def _bases(self, schema: TableSchema, rows: pa.Table) -> Iterator[tuple[int, bytes | None]]:
        """Of every incomplete upsert its number, and the stored image of its base as it is before this batch."""
        columns = zip(*(rows[c].to_pylist() for c in ("op", "complete", "key", "base")), strict=True)
        for number, (op, complete, key, base) in enumerate(columns):
            if op == "u" and not complete:
                yield number, self._stored(document_id(schema.relation, base if base is not None else key))

    def _complete(self, batch: TableBatch, rows: pa.Table) -> dict[int, dict[int, str | None] | None]:
        """Whole images of the incomplete upserts."""
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
            log.debug("partial images wait until their rows are copied", table=schema.topic, images=waiting)
        return completed

    @contextmanager
    def _undone_on_error(self, writer: tantivy.IndexWriter) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            writer.rollback()
            raise SinkUnavailable(f"the search index {str(self._path)!r} could not be written") from error

    def _write(self, writer: tantivy.IndexWriter, pending: PendingTable) -> None:
        schema, relation = self._held_index().schema, pending.schema.relation
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
    """Whether a record has a table where its batch brought it."""
    listed = record.tables.get(pending.schema.relation)
    return listed is not None and listed.position >= pending.upto


def _no_base(schema: TableSchema, rows: pa.Table, number: int) -> MissingBase:
    position = Position(rows["position"][number].as_py())
    return MissingBase(f"the target of table {schema.topic!r} has no base row for a partial image at {position}")


def _refuses(stands: TableRecord, batch: TableBatch) -> bool:
    """Whether a failed table would miss what came between its position and the batch."""
    return stands.state == TargetState.FAILED and batch.after > stands.position


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
    # tantivy reads a text that begins like an RFC 3339 time as one, and panics at one beyond its calendar
    document.add_json("_fields", {name: f" {text}" for name, text in texts.items()})
    return document


def _replace_reserved(writer: tantivy.IndexWriter, identity: str, content: str) -> None:
    writer.delete_documents_by_term("_id", identity)
    document = tantivy.Document()
    document.add_text("_id", identity)
    document.add_bytes("_image", content.encode())
    writer.add_document(document)


def _linked(index: Path, cut: Path) -> bool:
    """Link the index's committed files; False when a merge took one away meanwhile."""
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
    """The contract is pipelines.sinks.contract.ParkedRows.

    An index has one commit for rows, record and what is parked, so that none of them is ever there without the others:
    what `settle` says is in memory, as the rows are, until `put` hands it to the writer that publishes.
    """

    def __init__(self) -> None:
        self._stored: dict[int, Mapping[Key, ParkedRow]] = {}
        """As the index has it."""
        self._held: dict[int, Mapping[Key, ParkedRow]] = {}

    def load(self, stored: Mapping[int, Mapping[Key, ParkedRow]]) -> None:
        """Begin with what the index has; what was settled and never published is forgotten."""
        self._stored, self._held = dict(stored), dict(stored)

    def rows_of(self, relation: int) -> Mapping[Key, ParkedRow]:
        """See ParkedRows.rows_of."""
        return self._held.get(relation, {})

    def write(self, relation: int, after: int, entries: Iterable[DeadLetterEntry]) -> None:
        """See ParkedRows.write: nothing yet, for the rows of the batch are not durable before `publish` either."""

    def confirm(self, relation: int, rows: Mapping[Key, ParkedRow]) -> None:
        """See ParkedRows.confirm."""
        self._held[relation] = rows

    def put(self, writer: tantivy.IndexWriter, relation: int) -> None:
        """Write what became of a table's parked rows since the last commit."""
        stored, held = self._stored.get(relation, {}), self.rows_of(relation)
        for key in stored.keys() | held.keys():
            row = held.get(key)
            if row == stored.get(key):
                continue
            writer.delete_documents_by_term("_id", parked_id(relation, key))
            if row is not None:
                writer.add_document(_parked_document(row))

    def committed(self, relations: Iterable[int]) -> None:
        """What was put of these tables is durable."""
        self._stored |= {relation: self.rows_of(relation) for relation in relations}


def _parked_document(row: ParkedRow) -> tantivy.Document:
    document = tantivy.Document()
    document.add_text("_id", parked_id(row.relation, row.key))
    document.add_text("_topic", PARKED_TOPIC)
    document.add_bytes("_image", json.dumps(DeadLetterEntry(row).to_json(), ensure_ascii=False).encode())
    return document
