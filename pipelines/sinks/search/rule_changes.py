"""Rule changes: makes the documents of a search index follow the rules of the definition, when the sink is opened.

Theory. The index stores the rules under which the documents of each table were written. If the rules now hide or mask
more, every document is written again without the hidden values. All documents of the index are rewritten in one commit,
also those of other tables: tantivy removes a file only when all of its documents are deleted, and a deleted document
keeps its values in its file until then. Values that an earlier rule removed cannot be restored from the index. A table
that needs them stops with TargetRulesChanged until a replay, or until the earlier rule returns.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

import pyarrow as pa
import tantivy

from cdc.errors import HiddenColumnRenamed, SchemaNotApplicable, TargetRulesChanged, TransformFailed, complete_remedy
from cdc.table import TableSchema, TableState
from cdc.targets.column_mask import Mask
from cdc.targets.dead_letter_rows import DeadLetterEntry, Image
from cdc.targets.published_record import Published, TableRecord, TargetState
from cdc.targets.search_index_reader import (
    PARKED_TOPIC,
    PUBLISHED_ID,
    REBUILD,
    RULES_ID,
    DocumentRules,
    IndexedColumn,
    decode_image,
)
from pipelines.sinks.record_after_batch import failure_reason, with_progress_state
from pipelines.sinks.search.document_shape import DocumentShape, DocumentShapes
from pipelines.sinks.search.documents import (
    index_access,
    parked_document,
    reserved_document,
    rules_of_shape,
)
from pipelines.sinks.search.row_documents import RowDocuments, row_parts, rows_schema

DOCUMENTS_AT_ONCE: Final = 256
"""Number of documents that are rewritten together."""
_UNNAMED: Final = IndexedColumn("", searched=False)
"""A column that a document has and the rules do not: the source has dropped it, and readers do not show it."""


@dataclass(frozen=True, slots=True)
class RuleChange:
    """What the rules of a table change in its stored documents."""

    after: DocumentRules
    """The rules of the documents once `image` was applied to them."""
    masks: Mapping[int, Mask]
    """Masks of the columns that were not masked before."""
    hidden: tuple[str, ...]
    """Names of the columns that the documents have and must not show as they are."""
    lost: tuple[str, ...]
    """Names of the columns whose values should be in the documents and cannot be computed from them."""

    @classmethod
    def between(cls, stored: DocumentRules, shape: DocumentShape, added: frozenset[int] = frozenset()) -> RuleChange:
        """Return the difference between stored documents and a shape; added: ids that the source has added since."""
        wanted = rules_of_shape(shape)
        both = {number: column for number, column in wanted.columns.items() if number in stored.columns}
        masks = {n: mask for n, mask in shape.masks.items() if n in both and n not in stored.masks}
        gone = [column.name for number, column in stored.columns.items() if number not in both]
        lost = [c.name for n, c in wanted.columns.items() if n not in both and n not in added]
        lost += [c.name for n, c in both.items() if n in stored.masks and stored.masks[n] != wanted.masks.get(n)]
        remade = (stored.function or wanted.function) and stored.fingerprint != wanted.fingerprint
        if remade:
            lost = lost or [column.name for column in both.values()]
        kept = {n: stored.masks.get(n) or wanted.masks[n] for n in both if n in stored.masks or n in wanted.masks}
        partly = DocumentRules("", both, kept, stored.function)
        hidden = (*gone, *(both[number].name for number in masks))
        return cls(partly if lost else wanted, masks, hidden, tuple(lost))

    def image(self, image: Image) -> dict[int, str | None]:
        """Return the image of a stored document as the rules want it, as far as the document has the values."""
        own = self._own_columns(image)
        return {n: self.masks[n].of_text(text) if n in self.masks else text for n, text in own.items()}

    def parked_image(self, image: Image) -> dict[int, str | None]:
        """Return an image of a stored parked row as the rules want it; see DocumentShape.parked_image."""
        own = self._own_columns(image)
        return {n: self.masks[n].over(text) if n in self.masks else text for n, text in own.items()}

    def _own_columns(self, image: Image) -> dict[int, str | None]:
        return {number: text for number, text in image.items() if number in self.after.columns}


@dataclass(slots=True)
class FollowedRules:
    """What `open` has to commit, so that the index follows the rules."""

    record: Published
    """The published record, in which tables are stopped or continue."""
    rules: dict[int, DocumentRules]
    """Relation → rules of its documents after the commit."""
    changes: dict[int, RuleChange] = field(default_factory=dict)
    """Relation → change, for the tables whose documents must be rewritten."""
    errors: dict[int, TargetRulesChanged] = field(default_factory=dict)
    """Relation → why its table is stopped."""


def follow_rules(
    record: Published, stored: Mapping[int, DocumentRules], shapes: DocumentShapes, sink: str
) -> FollowedRules:
    """Compare the stored rules of an index with those of its sink.

    record: published record of the index. A table whose rule does not fit it is left as it is, because its next batch
    raises the error.
    """
    followed = FollowedRules(record, dict(stored))
    tables = dict(record.tables)
    for relation, table in record.tables.items():
        if table.schema is None:
            continue
        schema = TableSchema.from_json(table.schema)
        try:
            shape = shapes.of(schema)
        except (HiddenColumnRenamed, SchemaNotApplicable, TransformFailed):
            continue
        before = stored.get(relation) or DocumentRules.plain(schema)
        change = RuleChange.between(before, shape)
        if replace(before, stopped_in=None) != change.after:
            followed.changes[relation] = change
        if change.lost:
            followed.errors[relation] = stopped_error(table.topic, change.lost)
            tables[relation] = _stopped(table, followed.errors[relation], sink)
        else:
            tables[relation] = _continued(table, schema, before, record.position)
        followed.rules[relation] = replace(change.after, stopped_in=_stopped_in(table, before, change))
    followed.record = replace(record, tables=tables)
    return followed


def check_follows(stored: DocumentRules, shape: DocumentShape, before: TableSchema, now: TableSchema) -> None:
    """Raise TargetRulesChanged if a schema change at the source changed which stored values the rules hide.

    A renamed column, for example, can come under a mask. before, now: the schemas of the source table.
    """
    if before == now:
        return
    known, there = ({column.id for column in schema.columns} for schema in (before, now))
    added = frozenset(column.id for column in shape.columns if column.id not in known)
    # a column that the source dropped stays in older documents, and readers no longer show it
    present = {n: column for n, column in stored.columns.items() if n in there or n < 0}
    change = RuleChange.between(replace(stored, columns=present), shape, added)
    if found := change.lost or change.hidden:
        raise stopped_error(now.topic, found)


def stopped_error(topic: str, columns: tuple[str, ...]) -> TargetRulesChanged:
    """Return the error of a table whose documents cannot follow the rules; columns: names of the columns concerned."""
    return TargetRulesChanged(
        f"the documents of table {topic!r} were written under other rules than the definition has now, and the index "
        f"does not have the values to change columns {list(columns)!r}",
        remedy=REBUILD,
    )


def rewrite_documents(index: tantivy.Index, writer: tantivy.IndexWriter, followed: FollowedRules) -> None:
    """Delete all documents, and add those of rows and parked rows again, as the rules want them.

    The caller adds the record and the rules, and commits. Documents that belong to no published table are not added.
    """
    with index_access():
        documents = _documents(index.searcher())
        writer.delete_documents_by_query(tantivy.Query.all_query())
    while part := _next_part(documents):
        rows = defaultdict[tuple[str, int, tuple[int, ...]], list[list[Any]]](list)
        for document in part:
            if (topic := document.get_first("_topic")) is None:
                _add_reserved(writer, document)
            elif topic == PARKED_TOPIC:
                _add_parked(writer, document, followed)
            elif (relation := document["_relation"][0]) in followed.rules:
                image = _image(document, followed.changes.get(relation))
                place = (json.loads(bytes(document["_key"][0])), document["_position"][0], document["_ordinal"][0])
                rows[topic, relation, tuple(image)].append([*place, *image.values()])
        for (topic, relation, numbers), own in rows.items():
            columns = followed.rules[relation].columns
            documents_of_table = RowDocuments(topic, relation, {n: columns.get(n, _UNNAMED) for n in numbers})
            _add_rows(writer, documents_of_table, numbers, own)


def _documents(searcher: tantivy.Searcher) -> Iterator[tantivy.Document]:
    query = tantivy.Query.const_score_query(tantivy.Query.all_query(), 0.0)
    hits = searcher.search(query, limit=max(1, searcher.num_docs), count=False).hits
    return (searcher.doc(address) for _, address in hits)


def _next_part(documents: Iterator[tantivy.Document]) -> list[tantivy.Document]:
    with index_access():
        return list(islice(documents, DOCUMENTS_AT_ONCE))


def _image(document: tantivy.Document, change: RuleChange | None) -> Image:
    image = decode_image(bytes(document["_image"][0]))
    return image if change is None else change.image(image)


def _add_reserved(writer: tantivy.IndexWriter, document: tantivy.Document) -> None:
    identity = document["_id"][0]
    if identity not in {PUBLISHED_ID, RULES_ID}:
        kept = reserved_document(identity, bytes(document["_image"][0]).decode())
        with index_access():
            writer.add_document(kept)


def _add_parked(writer: tantivy.IndexWriter, document: tantivy.Document, followed: FollowedRules) -> None:
    row = DeadLetterEntry.from_json(json.loads(bytes(document["_image"][0]))).row
    change = followed.changes.get(row.relation)
    kept = parked_document(row if change is None else row.with_images(change.parked_image))
    with index_access():
        writer.add_document(kept)


def _add_rows(
    writer: tantivy.IndexWriter, documents: RowDocuments, numbers: Sequence[int], rows: Sequence[Sequence[Any]]
) -> None:
    """Add documents of one table. rows: key, position and ordinal, then the texts of the columns with these ids."""
    schema = rows_schema(numbers)
    table = pa.table(dict(zip(schema.names, zip(*rows, strict=True), strict=True)), schema)
    for part in row_parts(table):
        _, texts = documents.of(part)
        with index_access():
            for text in texts:
                writer.add_json(text)


def _stopped(table: TableRecord, error: TargetRulesChanged, sink: str) -> TableRecord:
    reason = complete_remedy(failure_reason(error), sink=sink, topic=table.topic)
    return replace(table, state=TargetState.FAILED.value, reason=reason)


def _stopped_in(table: TableRecord, before: DocumentRules, change: RuleChange) -> str | None:
    """Return the state that the table had before it stopped because of its rules; None if it did not stop."""
    if not change.lost:
        return None
    return before.stopped_in if _is_stopped_by_rules(table) else table.state


def _continued(table: TableRecord, schema: TableSchema, before: DocumentRules, position: int) -> TableRecord:
    """Return the record of a table whose documents follow its rules; if the table had stopped, it continues."""
    if not _is_stopped_by_rules(table):
        return table
    copying = schema.state is TableState.SNAPSHOTTING or before.stopped_in == TargetState.SNAPSHOTTING
    state = TargetState.SNAPSHOTTING if copying else TargetState.CATCHING_UP
    return with_progress_state(replace(table, state=state.value, reason=None), position)


def _is_stopped_by_rules(table: TableRecord) -> bool:
    return table.state == TargetState.FAILED and (table.reason or "").startswith(TargetRulesChanged.code)
