"""Documents of a search index: how parked rows and the reserved texts become documents, and a batch's rows.

The rows of a batch are reduced to the columns of their shape, and masked, before they are kept for the next commit: in
memory, or for a large batch in a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import tantivy

from cdc.table import TableSchema
from cdc.targets.dead_letter_rows import DeadLetterEntry, Image, ParkedRow
from cdc.targets.search_index_reader import (
    PARKED_TOPIC,
    DocumentRules,
    IndexedColumn,
    document_id,
    is_searched,
    parked_id,
    rows_of,
)
from pipelines.sinks.search.document_shape import DocumentShape
from pipelines.sinks.search.row_documents import PLACE, ROWS_AT_ONCE, RowDocuments, row_parts
from pipelines.sinks.unpublished_parked_rows import UnpublishedParkedRows

MANY_IDS: Final = 64
"""Number of ids from which one query deletes documents faster than a term for each."""


class IndexWriteFailed(OSError):
    """tantivy could not read or write the files of an index."""


@contextmanager
def index_access() -> Iterator[None]:
    """Raise IndexWriteFailed instead of ValueError, which tantivy raises for every failure.

    The block may only call tantivy, because a ValueError of other code is not a failure of the index.
    """
    try:
        yield
    except ValueError as error:
        raise IndexWriteFailed(str(error)) from error


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
        """Add and delete documents, so that the next commit of `writer` contains the batch. The caller commits.

        Raises IndexWriteFailed if tantivy cannot.
        """
        relation, schema = self.schema.relation, index.schema
        with index_access():
            if self.erase_all:
                writer.delete_documents_by_query(rows_of(schema, relation))
            elif self.erase_below is not None:
                writer.delete_documents_by_query(rows_of(schema, relation, below=self.erase_below))
        for start in range(0, len(self.deleted), ROWS_AT_ONCE):
            keys = self.deleted[start : start + ROWS_AT_ONCE]
            ids = [document_id(relation, key) for key in keys]
            with index_access():
                _delete(schema, writer, ids)
        documents = RowDocuments(self.schema.topic, relation, self.rules.columns)
        for rows in self._parts():
            ids, texts = documents.of(rows)
            with index_access():
                # the batch has each key once, so this deletes no row of an earlier part
                _delete(schema, writer, ids)
                for text in texts:
                    writer.add_json(text)

    def _parts(self) -> Iterator[pa.Table]:
        """Yield the rows to write, in parts; all their images are complete."""
        first = 0
        for rows in row_parts(self.upserts):
            numbers = range(rows.num_rows)
            images = {n: self.completed[first + n] for n in numbers if first + n in self.completed}
            first += rows.num_rows
            if written := _with_images(rows, images) if images else rows:
                yield written


def _delete(schema: tantivy.Schema, writer: tantivy.IndexWriter, ids: Sequence[str]) -> None:
    if len(ids) >= MANY_IDS:
        writer.delete_documents_by_query(tantivy.Query.term_set_query(schema, "_id", ids))
        return
    for identity in ids:
        writer.delete_documents_by_term("_id", identity)


def _with_images(rows: pa.Table, images: Mapping[int, Image | None]) -> pa.Table:
    """Replace the images of some rows. images: number of a row → its image; None leaves the row out."""
    texts = {name: rows[name].to_pylist() for name in rows.column_names[len(PLACE) :]}
    for number, image in images.items():
        for column, text in (image or {}).items():
            texts[str(column)][number] = text
    written = pa.array([images.get(number, {}) is not None for number in range(rows.num_rows)])
    return pa.table({**{name: rows[name] for name in PLACE}, **texts}, rows.schema).filter(written).combine_chunks()


def masked_upserts(upserts: pa.Table, shape: DocumentShape) -> Iterator[pa.Table]:
    """Yield key, position and ordinal of folded upserts, then the masked texts of the shape's columns, in parts.

    An unsent column of a partial image has a placeholder. Raises the errors of `DocumentShape.texts`.
    """
    names = [*PLACE, *(str(column.id) for column in shape.columns)]
    starts = range(0, max(upserts.num_rows, 1), ROWS_AT_ONCE)
    for start in starts:
        part = upserts.slice(start, ROWS_AT_ONCE)
        yield pa.table([*(part[name] for name in PLACE), *shape.texts(part)], names=names)


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
    """Replace the reserved document with this `_id`. The caller commits. Raises IndexWriteFailed if tantivy cannot."""
    document = reserved_document(identity, content)
    with index_access():
        writer.delete_documents_by_term("_id", identity)
        writer.add_document(document)


def rules_text(rules: Mapping[int, DocumentRules]) -> str:
    """Return the content of the document with the rules; `rules`: relation → rules of its documents."""
    return json.dumps({str(relation): one.to_json() for relation, one in rules.items()}, ensure_ascii=False)


class DeadLetterDocuments(UnpublishedParkedRows):
    """Implements pipelines.sinks.contract.ParkedRows: the parked rows of a search sink, as documents of its index.

    One commit of the index writes rows, published record and parked rows together.
    """

    def put(self, writer: tantivy.IndexWriter, relation: int) -> None:
        """Add and delete documents, so that the next commit of `writer` stores exactly the parked rows of the table.

        The caller commits. Raises IndexWriteFailed if tantivy cannot.
        """
        stored, parked = self.stored_rows_of(relation), self.rows_of(relation)
        for key in stored.keys() | parked.keys():
            row = parked.get(key)
            if row == stored.get(key):
                continue
            identity, document = parked_id(relation, key), None if row is None else parked_document(row)
            with index_access():
                writer.delete_documents_by_term("_id", identity)
                if document is not None:
                    writer.add_document(document)
