"""Row writer: turns the folded rows of a table into documents, and writes them; driver and executors use it.

A row becomes a document with the position of its change as external version, so a document never goes back to an older
row. A delete becomes a document without columns (see `cdc.targets.search_server.index_mapping`).

A partial image is completed from the document of its base row. After a crash the documents may already be newer than
the range that is applied again, up to another end:

- If the document of the row is at or after the image's position, the image has been applied, and is left out.
- If the row moved to another key, its base document may have been deleted or replaced by another row. So the writer
  stores the base documents of moved rows before it writes anything, and uses stored ones again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.search_server import SearchServer
from cdc.errors import CdcError, IndexMissing, TransformFailed
from cdc.target_names import DELETED_COLUMN, POSITION_COLUMN
from cdc.targets.search_server.client import SearchClient, error_reason
from cdc.targets.search_server.document_values import (
    NULL,
    RAW_FIELD,
    RAW_START,
    ValueKind,
    ValueType,
    dump_json,
    parse_document,
    to_json,
)
from cdc.targets.search_server.index_names import document_key, write_alias
from cdc.targets.search_server.sink_state import SinkState
from pipelines.sinks.record_after_batch import missing_base
from pipelines.sinks.search_server.bulk_writer import BulkWriter, Line
from pipelines.sinks.search_server.document_lines import TableIndex, document_lines
from pipelines.types.typed_rows import sent_cells

GET_AT_ONCE: Final = 500
"""Number of documents that one request reads."""


@dataclass(slots=True)
class PlannedRows:
    """The documents of a batch before they are written, and the rows that cannot become documents."""

    lines: Iterable[Line] = ()
    """The documents; they are built while the first of them are written, so only `write` may read them."""
    missing: dict[int, CdcError] = field(default_factory=dict)
    """Number of each partial image without a base row → its error; none during a full copy, which has the row later."""
    bases: dict[str, str] = field(default_factory=dict)
    """Id → JSON of the document, for the bases of moved rows; they are stored before the lines are written."""
    bases_id: str = ""
    """Id of the document of the state with these bases; empty if the batch has no moved rows."""


class RowWriter:
    """Writes rows of any table; one thread at a time may use an instance."""

    def __init__(self, client: SearchClient, state: SinkState, writer: BulkWriter) -> None:
        self._client, self._state, self.writer = client, state, writer

    def plan(self, rows: pa.Table, table: TableIndex, since: int, *, is_copying: bool) -> PlannedRows:
        """Return the documents of folded rows. since: published position of the table, before this batch.

        is_copying: whether a full copy is running; partial images without a base row are then left out.
        """
        found = PlannedRows()
        completed = self._complete(rows, table, since, found)
        if is_copying:
            found.missing = {}
        found.lines = document_lines(rows, table, completed)
        return found

    def write(self, planned: PlannedRows, table: TableIndex) -> dict[int, CdcError]:
        """Write planned documents; return row number → error of each row that the server refuses or that has no base
        row.
        """
        self.store_bases(planned)
        return self.writer.write(write_alias(table.index), planned.lines) | planned.missing

    def store_bases(self, planned: PlannedRows) -> None:
        """Store the bases of moved rows, so that a later attempt finds them although the documents are newer then."""
        if planned.bases:
            self._state.put_whole(planned.bases_id, {"documents": planned.bases})

    def _complete(self, rows: pa.Table, table: TableIndex, since: int, found: PlannedRows) -> dict[int, str | None]:
        """Return number of each partial image → the JSON of its document; None for a row that is left out."""
        partial, sources = _partial_rows(rows), dict[int, str | None]()
        if not partial:
            return sources
        if table.shape.needs_complete_rows:
            raise TransformFailed(
                f"the function of the rule of table {table.shape.schema.topic!r} needs complete rows, but the source "
                "did not send all columns",
                remedy="run ALTER TABLE … REPLICA IDENTITY FULL at the source, or remove the function from the rule",
            )
        images = rows.take(pa.array(partial))
        current = _CurrentDocuments(self._client, self._state, table, since)
        current.read(images)
        sent, own = sent_cells(images, table.shape.schema), table.shape.texts(images)
        for place, number in enumerate(partial):
            key, position = rows["key"][number].as_py(), rows["position"][number].as_py()
            base = rows["base"][number].as_py() or key
            sources[number] = None
            if current.is_applied(key, position):
                continue
            document = current.base(base)
            if document is None:
                found.missing[number] = missing_base(table.shape.schema, position)
                continue
            if base != key:
                current.keep(base)
            cells = [to_json(texts.slice(place, 1), c.type)[0] for texts, c in zip(own, table.columns, strict=True)]
            sources[number] = _overlaid(table, cells, sent[:, place], document, position)
        found.bases, found.bases_id = current.to_store, current.bases_id
        return sources


def open_row_writer(client: SearchClient, access: SearchServer, sink: str) -> RowWriter:
    """Return a row writer for the tables of a sink."""
    writer = BulkWriter(client, size=access.bulk_size, requests=access.bulk_requests)
    return RowWriter(client, SinkState(client, sink), writer)


class _CurrentDocuments:
    """The documents that a batch of partial images needs, as the server has them now."""

    def __init__(self, client: SearchClient, state: SinkState, table: TableIndex, since: int) -> None:
        self._client, self._state, self._table = client, state, table
        self._id = f"bases-{table.index}-{since}"
        self._found: dict[str, dict[str, Any]] = {}
        self._stored: dict[str, str] = {}
        self._is_new = False

    def read(self, images: pa.Table) -> None:
        """Read the documents of the rows and of their base rows, and the stored bases if rows moved."""
        keys, bases = images["key"].to_pylist(), [base for base in images["base"].to_pylist() if base is not None]
        self._found = self._many(write_alias(self._table.index), {document_key(key) for key in [*keys, *bases]})
        stored = self._state.get_whole(self._id) if bases else None
        self._stored = {} if stored is None else stored["documents"]

    def is_applied(self, key: Sequence[str | None], position: int) -> bool:
        """Return whether the document of a row is at or after a position."""
        document = self._found.get(document_key(key))
        return document is not None and int(document[POSITION_COLUMN]) >= position

    def base(self, key: Sequence[str | None]) -> Mapping[str, Any] | None:
        """Return the document of a base row; None if the row does not exist."""
        stored = self._stored.get(document_key(key))
        if stored is not None:
            return parse_document(stored)
        document = self._found.get(document_key(key))
        if document is None or document.get(DELETED_COLUMN) or int(document[POSITION_COLUMN]) < self._table.floor:
            return None
        return document

    def keep(self, key: Sequence[str | None]) -> None:
        """Add the document of the base of a moved row to those to store."""
        identity = document_key(key)
        if identity not in self._stored:
            self._stored[identity] = dump_json(self._found[identity])
            self._is_new = True

    @property
    def to_store(self) -> dict[str, str]:
        """All bases, if `keep` added some; otherwise empty."""
        return self._stored if self._is_new else {}

    @property
    def bases_id(self) -> str:
        """Id of the document with the bases, which is not needed after the batch is published; empty without bases."""
        return self._id if self._stored else ""

    def _many(self, index: str, wanted: Iterable[str]) -> dict[str, dict[str, Any]]:
        ids = sorted(wanted)
        found: dict[str, dict[str, Any]] = {}
        for start in range(0, len(ids), GET_AT_ONCE):
            body = {"ids": ids[start : start + GET_AT_ONCE]}
            answer = self._client.ask("POST", f"/{index}/_mget", body, exact=True)
            documents = answer.body["docs"]
            if failed := next((one for one in documents if "error" in one), None):
                raise IndexMissing(f"documents of index {index!r} cannot be read: {error_reason(failed)}")
            found |= {one["_id"]: one["_source"] for one in documents if one.get("found")}
        return found


def without_moved(rows: pa.Table) -> pa.Table:
    """Return the rows without partial images of rows that moved to another key."""
    moved = _is_moved(rows)
    return rows.filter(pc.invert(moved)) if pc.any(moved).as_py() else rows


def only_moved(rows: pa.Table) -> pa.Table:
    """Return the partial images of rows that moved to another key; the document of the old key completes them."""
    return rows.filter(_is_moved(rows))


def _is_moved(rows: pa.Table) -> pa.ChunkedArray:
    return pc.and_(_is_partial(rows), pc.is_valid(rows["base"]))


def _is_partial(rows: pa.Table) -> pa.ChunkedArray:
    return pc.fill_null(pc.and_(pc.equal(rows["op"], "u"), pc.invert(rows["complete"])), fill_value=False)


def _partial_rows(rows: pa.Table) -> list[int]:
    return np.flatnonzero(_is_partial(rows).to_numpy()).tolist()


def _overlaid(
    table: TableIndex, cells: Sequence[str], sent: np.ndarray, document: Mapping[str, Any], position: int
) -> str:
    """Return the JSON of a document: the sent columns of an image, and the other columns of the base document.

    cells: the JSON of each column, with placeholders for unsent columns. sent: whether the image has the column.
    """
    fragments, raw = [], []
    stored = {**document, **document.get(RAW_FIELD, {})}
    for cell, is_sent, column in zip(cells, sent, table.columns, strict=True):
        text = cell if is_sent or column.field not in stored else dump_json(stored[column.field])
        is_raw = column.type == ValueType(ValueKind.JSON) and text.startswith(RAW_START)
        if is_raw:
            raw.append(f'"{column.field}":{text}')
        fragments.append(f'"{column.field}":{NULL if is_raw else text}')
    members = f',"{RAW_FIELD}":{{{",".join(raw)}}}' if raw else ""
    return f'{{{",".join(fragments)},"{POSITION_COLUMN}":{position}{members}}}'
