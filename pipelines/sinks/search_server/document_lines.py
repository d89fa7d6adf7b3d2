"""Document lines: the lines of bulk requests with which the folded rows of a table are written.

Arrow builds the lines of some thousand rows at once. Python code runs for single rows only where a value is unusual.
The lines are built while earlier ones are being written, so a batch is never in memory as a whole a second time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring  # type: ignore[attr-defined] # written in C, and missing in the stubs
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.target_names import DELETED_COLUMN, POSITION_COLUMN
from cdc.targets.search_server.document_values import (
    NULL,
    RAW_FIELD,
    RAW_START,
    ValueKind,
    ValueType,
    json_array,
)
from cdc.targets.search_server.index_mapping import DocumentColumn
from cdc.targets.search_server.index_names import are_ids, document_key
from pipelines.sinks.search.document_shape import DocumentShape
from pipelines.sinks.search.row_documents import row_parts
from pipelines.sinks.search_server.bulk_writer import Line

_ID: Final = ValueType(ValueKind.EXACT)
_JSON: Final = ValueType(ValueKind.JSON)
_VERSION_TYPE: Final = ',"version_type":"external_gte"}}\n'


@dataclass(frozen=True, slots=True)
class TableIndex:
    """The index of one table, and how its rows become documents."""

    index: str
    shape: DocumentShape
    columns: tuple[DocumentColumn, ...]
    """The columns of `shape.columns`, in their order."""
    floor: int
    """Rows at a lower position are invisible."""


def document_lines(rows: pa.Table, table: TableIndex, completed: Mapping[int, str | None]) -> Iterator[Line]:
    """Yield the line of each folded row, with the number of the row.

    completed: number of each partial image → JSON of its document; None for a row that is left out.
    """
    start = 0
    for part in row_parts(rows):
        numbers = range(start, start + part.num_rows)
        partial = {number: completed[number] for number in numbers if number in completed} if completed else {}
        for number, content in zip(numbers, _contents(part, table), strict=True):
            if number not in partial:
                yield Line(number, content)
            elif (source := partial[number]) is not None:
                # the first of the two lines is that of a complete image
                yield Line(number, content[: content.index(b"\n") + 1] + f"{source}\n".encode())
        start += part.num_rows


def _contents(rows: pa.Table, table: TableIndex) -> list[bytes]:
    """Return both lines of each row, as if every image were complete."""
    positions = _one_chunk(rows["position"]).cast(pa.string())
    action = ['{"index":{"_id":', _ids(_one_chunk(rows["key"])), ',"version":', positions, _VERSION_TYPE]
    fields: list[str | pa.Array] = []
    unusual: dict[int, list[str]] = defaultdict(list)
    for column, texts in zip(table.columns, table.shape.texts(rows), strict=True):
        values = json_array(texts, column.type)
        if column.type == _JSON:
            values = _without_unusual(values, column.field, unusual)
        fields += [f'{"," if fields else "{"}"{column.field}":', values]
    upserted = [*fields, f'{"," if fields else "{"}"{POSITION_COLUMN}":', positions, "}\n"]
    lines = pc.binary_join_element_wise(*action, *upserted, "")
    is_delete = pc.equal(_one_chunk(rows["op"]), "d")
    if pc.any(is_delete).as_py():
        deleted = [f'{{"{POSITION_COLUMN}":', positions, f',"{DELETED_COLUMN}":true}}\n']
        lines = pc.if_else(is_delete, pc.binary_join_element_wise(*action, *deleted, ""), lines)
    contents: list[bytes] = lines.cast(pa.binary()).to_pylist()
    for number, members in unusual.items():
        raw = f',"{RAW_FIELD}":{{{",".join(members)}}}}}\n'
        contents[number] = contents[number].removesuffix(b"}\n") + raw.encode()
    return contents


def _without_unusual(values: pa.Array, field: str, unusual: dict[int, list[str]]) -> pa.Array:
    """Return JSON values with null instead of unusual ones, which are added to `unusual` as members of RAW_FIELD."""
    is_unusual = pc.starts_with(values, RAW_START)
    if not pc.any(is_unusual).as_py():
        return values
    for number in pc.indices_nonzero(is_unusual).to_pylist():
        unusual[number].append(f'"{field}":{values[number].as_py()}')
    return pc.if_else(is_unusual, NULL, values)


def _ids(keys: pa.Array) -> pa.Array:
    """Return the id of the document of each key, as JSON."""
    texts = keys.flatten()
    if pc.all(pc.equal(keys.value_lengths(), 1), min_count=0).as_py() and are_ids(texts):
        return json_array(texts, _ID)
    return pa.array([encode_basestring(document_key(key)) for key in keys.to_pylist()], pa.string())


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
