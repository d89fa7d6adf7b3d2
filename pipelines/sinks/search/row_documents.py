"""Row documents: the documents of rows of a table in a tantivy index, as JSON texts for `IndexWriter.add_json`.

tantivy reads one text much faster than Python builds a document from its fields. Arrow builds the texts of some
thousand rows at once, column by column. Python code runs for each row only where a text must be escaped.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.json_arrays import concatenated, or_null, quote, quoted, text_bytes
from cdc.targets.search_index_reader import TERM_BYTES, IndexedColumn, id_of_key

ROWS_AT_ONCE: Final = 4_096
"""Maximum rows that are converted together."""
BYTES_AT_ONCE: Final = 64 << 20
"""Maximum bytes of such rows, unless one row is larger; an Arrow array of text contains at most 2 GiB."""
PLACE: Final = ("key", "position", "ordinal")
"""The first columns of rows; the texts of their columns follow."""
_TEXT: Final = pa.large_string()
"""Type of the texts here: the document of a row with texts of 1 GiB has more than 2 GiB."""
_COMMA: Final = ", "
_BYTES: Final = pa.large_binary()
_PADDING: Final = pa.array([b"", b"\0\0", b"\0"], _BYTES)
"""Length of a text modulo 3 → bytes that base64 adds to it."""


def rows_schema(columns: Iterable[int]) -> pa.Schema:
    """Return the schema of rows whose texts are those of the columns with these ids."""
    place = (pa.field("key", pa.list_(pa.string())), pa.field("position", pa.int64()), pa.field("ordinal", pa.int64()))
    return pa.schema([*place, *(pa.field(str(number), pa.string()) for number in columns)])


def row_parts(rows: pa.Table) -> Iterator[pa.Table]:
    """Divide rows into parts that can be converted together; each column of a part has one chunk."""
    start = 0
    while start < rows.num_rows:
        size = ROWS_AT_ONCE
        while size > 1 and rows.slice(start, size).nbytes > BYTES_AT_ONCE:
            size //= 2
        yield rows.slice(start, size).combine_chunks()
        start += size


class RowDocuments:
    """Makes the documents of the rows of one table. columns: column id → column, in the order of the texts of a row."""

    def __init__(self, topic: str, relation: int, columns: Mapping[int, IndexedColumn]) -> None:
        self._relation = relation
        self._table = f', "_relation": {relation}, "_topic": {quote(topic)}, "_key": "'
        self._members = [f'{", " if place else ""}"{number}": ' for place, number in enumerate(columns)]
        # tantivy parses a text that begins like an RFC 3339 time, and panics if the time is out of its range
        self._names = {
            place: f'{_COMMA}{quote(column.name)}: " '
            for place, column in enumerate(columns.values())
            if column.searched
        }

    def of(self, rows: pa.Table) -> tuple[list[str], list[str]]:
        """Return the `_id` of each row, and the JSON of its document.

        rows: a part, as `row_parts` yields it: key, position and ordinal, then the texts of the columns, as the index
        may show them.
        """
        keys, positions, ordinals, *texts = (column.chunk(0) for column in rows.columns)
        values, key_texts = [quoted(column.cast(_TEXT)) for column in texts], _key_texts(keys)
        ids = self._ids(key_texts)
        searched = [pc.binary_replace_slice(values[place], 0, 0, _COMMA) for place in self._names]
        fields = [pc.binary_replace_slice(values[place], 0, 1, name) for place, name in self._names.items()]
        start = ['{"_id": "', _escape_ids(ids), '"', self._table, _encode_base64(key_texts)]
        place = ['", "_position": ', positions.cast(_TEXT), ', "_ordinal": ', ordinals.cast(_TEXT)]
        words = ['", "_text": [', *_list(searched), '], "_fields": {', *_list(fields), "}}"]
        images = self._images(values) if values else pa.repeat(pa.scalar("{}", _TEXT), len(ids))
        documents = concatenated([*start, *place, ', "_image": "', _encode_base64(images), *words])
        return ids.to_pylist(), documents.to_pylist()

    def _images(self, values: list[pa.Array]) -> pa.Array:
        members = [part for member in zip(self._members, map(or_null, values), strict=True) for part in member]
        return concatenated(["{", *members, "}"])

    def _ids(self, key_texts: pa.Array) -> pa.Array:
        """Return the `_id` of each document. key_texts: the keys of the rows, as `key_json` returns them."""
        ids = concatenated([f"{self._relation}\0", key_texts])
        if pc.max(pc.binary_length(ids)).as_py() <= TERM_BYTES:
            return ids
        return pa.array([id_of_key(self._relation, key) for key in key_texts.to_pylist()], _TEXT)


def _list(columns: list[pa.Array]) -> list[pa.Array]:
    """Return the texts of each row that are not null, without the first comma; no column if there are none."""
    if not columns:
        return []
    # Arrow's own way to skip nulls drops a row that has only nulls (pyarrow 26)
    with_comma = concatenated([pc.fill_null(column, "") for column in columns])
    return [pc.binary_replace_slice(with_comma, 0, len(_COMMA), "")]


def _key_texts(keys: pa.Array) -> pa.Array:
    """Return each key as `key_json` does."""
    offsets = pc.subtract(keys.offsets, keys.offsets[0])
    lists = pa.ListArray.from_arrays(offsets, or_null(quoted(keys.flatten().cast(_TEXT))))
    return concatenated(["[", pc.binary_join(lists, pa.scalar(_COMMA, _TEXT)), "]"])


def _escape_ids(ids: pa.Array) -> pa.Array:
    """Return ids as JSON without its quotes. Keys in ids are JSON, so no other characters need an escape."""
    for character, escape in {"\\": "\\\\", '"': '\\"', "\0": "\\u0000"}.items():
        ids = pc.replace_substring(ids, character, escape)
    return ids


def _encode_base64(texts: pa.Array) -> pa.Array:
    """Return each text as the value of a field of bytes, which tantivy decodes."""
    rests = pc.binary_length(texts).to_numpy() % 3
    padded = pc.binary_join_element_wise(texts.cast(_BYTES), _PADDING.take(pa.array(rests)), pa.scalar(b"", _BYTES))
    # all texts at once, because the length of each is a multiple of 3 now
    encoded = np.frombuffer(bytearray(b2a_base64(text_bytes(padded).data, newline=False)), np.uint8)
    offsets = np.frombuffer(padded.buffers()[1], np.int64, len(padded) + 1) // 3 * 4
    ends = offsets[1:]
    encoded[ends[rests > 0] - 1] = ord("=")
    encoded[ends[rests == 1] - 2] = ord("=")
    return pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(offsets), pa.py_buffer(encoded))
