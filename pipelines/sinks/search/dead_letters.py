"""ParkedDocuments: the rows that a search sink could not take, each a document of its own in the index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import tantivy

from cdc.stores.dead_letter_rows import DeadLetterEntry, Key, ParkedRow
from cdc.stores.search_index import PARKED_TOPIC, parked_id


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
                writer.add_document(_document(row))

    def committed(self, relations: Iterable[int]) -> None:
        """What was put of these tables is durable."""
        self._stored |= {relation: self.rows_of(relation) for relation in relations}


def _document(row: ParkedRow) -> tantivy.Document:
    document = tantivy.Document()
    document.add_text("_id", parked_id(row.relation, row.key))
    document.add_text("_topic", PARKED_TOPIC)
    document.add_bytes("_image", json.dumps(DeadLetterEntry(row).to_json(), ensure_ascii=False).encode())
    return document
