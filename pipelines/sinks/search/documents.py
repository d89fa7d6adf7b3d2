"""Documents of a search index: how rows, parked rows and the reserved texts become documents, and a batch's rows.

The rows of a batch are reduced to the columns of their shape, and masked, before they are kept for the next commit: in
memory, or for a large batch in a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import tantivy

from cdc.stores.dead_letter_rows import DeadLetterEntry, Image, ParkedRow
from cdc.stores.search_index_reader import (
    PARKED_TOPIC,
    DocumentRules,
    IndexedColumn,
    document_id,
    image_json,
    is_searched,
    key_json,
    parked_id,
    rows_of,
)
from cdc.table import TableSchema
from pipelines.sinks.search.document_shape import DocumentShape
from pipelines.sinks.unpublished_parked_rows import UnpublishedParkedRows

ROWS_AT_ONCE: Final = 4096
"""Number of rows that are converted at once."""
_ORDER: Final = ("key", "position", "ordinal")


@dataclass(frozen=True, slots=True)
class IndexedRow:
    """One row of a table, as its document stores it."""

    topic: str
    relation: int
    key: Sequence[str | None]
    position: int
    ordinal: int
    image: Image
    """Column id → text, for the columns of the document; masked columns have their masked text."""


@dataclass(frozen=True, slots=True)
class PendingTable:
    """A batch of one table that the next publish writes: it first deletes documents, then it adds rows."""

    schema: TableSchema
    rules: DocumentRules
    upto: int
    erase_all: bool
    """Whether a truncate deletes all documents of the table."""
    erase_below: int | None
    """If a full copy ended in the batch, the position of its start; older documents are deleted. Otherwise None."""
    deleted: Sequence[Sequence[str | None]]
    """The keys of deleted rows."""
    upserts: pa.Table
    """Key, position and ordinal of the other rows, then the texts of the columns of `rules`, in their order."""
    completed: Mapping[int, Image | None] = field(default_factory=dict)
    """Number of an upsert with a partial image → its complete image.

    None instead of an image means that the row is not written: a running full copy has not copied its base row yet.
    """

    def write(self, index: tantivy.Index, writer: tantivy.IndexWriter) -> None:
        """Add and delete documents, so that the next commit of `writer` contains the batch. The caller commits."""
        relation = self.schema.relation
        if self.erase_all:
            writer.delete_documents_by_query(rows_of(index.schema, relation))
        elif self.erase_below is not None:
            writer.delete_documents_by_query(rows_of(index.schema, relation, below=self.erase_below))
        for key in self.deleted:
            writer.delete_documents_by_term("_id", document_id(relation, key))
        for row in self._rows():
            writer.delete_documents_by_term("_id", document_id(relation, row.key))
            writer.add_document(row_document(row, self.rules))

    def _rows(self) -> Iterator[IndexedRow]:
        number, ids = 0, list(self.rules.columns)
        for part in self.upserts.to_batches(max_chunksize=ROWS_AT_ONCE):
            keys, positions, ordinals, *texts = (column.to_pylist() for column in part.columns)
            images = zip(*texts, strict=True) if texts else ((),) * part.num_rows
            for key, position, ordinal, values in zip(keys, positions, ordinals, images, strict=True):
                image = self.completed.get(number, dict(zip(ids, values, strict=True)))
                number += 1
                if image is not None:
                    yield IndexedRow(self.schema.topic, self.schema.relation, key, position, ordinal, image)


def masked_upserts(upserts: pa.Table, shape: DocumentShape) -> Iterator[pa.Table]:
    """Yield key, position and ordinal of folded upserts, then the masked texts of the shape's columns, in parts.

    An unsent column of a partial image has a placeholder. Raises the errors of `DocumentShape.texts`.
    """
    names = [*_ORDER, *(str(column.id) for column in shape.columns)]
    starts = range(0, max(upserts.num_rows, 1), ROWS_AT_ONCE)
    for start in starts:
        part = upserts.slice(start, ROWS_AT_ONCE)
        yield pa.table([*(part[name] for name in _ORDER), *shape.texts(part)], names=names)


def on_disk(parts: Iterable[pa.Table], folder: Path) -> pa.Table | None:
    """Write tables of one schema to a file in a folder, and return them as one table; None if there are none.

    The kernel reads pages of the table when they are used, and takes their memory back when it needs it. The file has
    no name, so it disappears with the table, and also after a crash.
    """
    with TemporaryFile(dir=folder) as file:
        writer: pa.RecordBatchFileWriter | None = None
        for part in parts:
            if writer is None:
                writer = pa.ipc.new_file(file, part.schema)
            writer.write_table(part)
        if writer is None:
            return None
        writer.close()
        file.flush()
        return pa.ipc.open_file(pa.py_buffer(mmap(file.fileno(), 0, access=ACCESS_READ))).read_all()


def divide_rows(rows: pa.Table) -> tuple[list[list[str | None]], pa.Table]:
    """Return the keys of the deleted rows of a batch, and its other rows."""
    is_upsert = pc.equal(rows["op"], "u")
    if pc.all(is_upsert, min_count=0).as_py():
        return [], rows  # without a copy, because the rows may be on disk
    deleted: list[list[str | None]] = rows["key"].filter(pc.invert(is_upsert)).to_pylist()
    return deleted, rows.filter(is_upsert)


def rules_of_shape(shape: DocumentShape) -> DocumentRules:
    """Return the rules that the index stores about documents of a shape."""
    missing, function = shape.missing, None
    if shape.transform is not None:
        function = shape.transform.rule.python
    columns = {c.id: IndexedColumn(c.name, missing[c.id], is_searched(c)) for c in shape.columns}
    masks = {number: mask.fingerprint for number, mask in shape.masks.items() if number in columns}
    return DocumentRules(shape.fingerprint, columns, masks, function)


def row_document(row: IndexedRow, rules: DocumentRules) -> tantivy.Document:
    """Return the document of a row whose image follows the rules."""
    document = tantivy.Document()
    document.add_text("_id", document_id(row.relation, row.key))
    document.add_unsigned("_relation", row.relation)
    document.add_text("_topic", row.topic)
    document.add_bytes("_key", key_json(row.key).encode())
    document.add_unsigned("_position", row.position)
    document.add_unsigned("_ordinal", row.ordinal)
    document.add_bytes("_image", image_json(row.image).encode())
    searched = ((c.name, row.image.get(number)) for number, c in rules.columns.items() if c.searched)
    texts = {name: text for name, text in searched if text is not None}
    for text in texts.values():
        document.add_text("_text", text)
    # tantivy parses a text that begins like an RFC 3339 time, and panics if the time is out of its range
    document.add_json("_fields", {name: f" {text}" for name, text in texts.items()})
    return document


def parked_document(row: ParkedRow) -> tantivy.Document:
    """Return the document of a parked row."""
    document = tantivy.Document()
    document.add_text("_id", parked_id(row.relation, row.key))
    document.add_text("_topic", PARKED_TOPIC)
    document.add_bytes("_image", json.dumps(DeadLetterEntry(row).to_json(), ensure_ascii=False).encode())
    return document


def reserved_document(identity: str, content: str) -> tantivy.Document:
    """Return the reserved document with this `_id`."""
    document = tantivy.Document()
    document.add_text("_id", identity)
    document.add_bytes("_image", content.encode())
    return document


def replace_reserved(writer: tantivy.IndexWriter, identity: str, content: str) -> None:
    """Replace the reserved document with this `_id`. The caller commits."""
    writer.delete_documents_by_term("_id", identity)
    writer.add_document(reserved_document(identity, content))


def rules_text(rules: Mapping[int, DocumentRules]) -> str:
    """Return the content of the document with the rules; `rules`: relation → rules of its documents."""
    return json.dumps({str(relation): one.to_json() for relation, one in rules.items()}, ensure_ascii=False)


class DeadLetterDocuments(UnpublishedParkedRows):
    """Implements pipelines.sinks.contract.ParkedRows: the parked rows of a search sink, as documents of its index.

    One commit of the index writes rows, published record and parked rows together.
    """

    def put(self, writer: tantivy.IndexWriter, relation: int) -> None:
        """Add and delete documents, so that the next commit of `writer` stores exactly the parked rows of the table.

        The caller commits.
        """
        stored, parked = self.stored_rows_of(relation), self.rows_of(relation)
        for key in stored.keys() | parked.keys():
            row = parked.get(key)
            if row == stored.get(key):
                continue
            writer.delete_documents_by_term("_id", parked_id(relation, key))
            if row is not None:
                writer.add_document(parked_document(row))
