"""Row documents: the documents of rows of a table in a tantivy index, as JSON texts for `IndexWriter.add_json`.

tantivy reads one text much faster than Python builds a document from its fields.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from json.encoder import encode_basestring  # type: ignore[attr-defined] # written in C, and missing in the stubs
from typing import Final

import pyarrow as pa

from cdc.stores.search_index_reader import NULL, IndexedColumn, id_of_key, key_json

ROWS_AT_ONCE: Final = 4_096
"""Maximum rows that are converted together."""
BYTES_AT_ONCE: Final = 64 << 20
"""Maximum bytes of such rows, unless one row is larger; an Arrow array of text contains at most 2 GiB."""
PLACE: Final = ("key", "position", "ordinal")
"""The first columns of rows; the texts of their columns follow."""


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
        self._table = f'"_relation": {relation}, "_topic": {encode_basestring(topic)}'
        members = [f'"{number}": %s' for number in columns]
        self._image = f"{{{', '.join(members)}}}"
        self._searched = [place for place, column in enumerate(columns.values()) if column.searched]
        # tantivy parses a text that begins like an RFC 3339 time, and panics if the time is out of its range
        self._names = [f'{encode_basestring(column.name)}: " ' for column in columns.values() if column.searched]

    def of(self, rows: pa.Table) -> list[tuple[str, str]]:
        """Return the `_id` and the JSON of the document of each row.

        rows: a part, as `row_parts` yields it: key, position and ordinal, then the texts of the columns, as the index
        may show them.
        """
        keys, positions, ordinals, *texts = (column.to_pylist() for column in rows.columns)
        # column by column, because this is several times faster than row by row
        quoted = [[NULL if text is None else encode_basestring(text) for text in column] for column in texts]
        images = zip(*quoted, strict=True) if quoted else repeat(())
        return [
            self._document(key_json(key), f'"_position": {position}, "_ordinal": {ordinal}', image)
            for key, position, ordinal, image in zip(keys, positions, ordinals, images, strict=False)
        ]

    def _document(self, key: str, place: str, image: tuple[str, ...]) -> tuple[str, str]:
        identity = id_of_key(self._relation, key)
        values = [image[place] for place in self._searched]
        searched = [(name, value) for name, value in zip(self._names, values, strict=True) if value != NULL]
        words = ", ".join([value for _, value in searched])
        fields = ", ".join([name + value[1:] for name, value in searched])
        return identity, (
            f'{{"_id": {encode_basestring(identity)}, {self._table}, "_key": "{_base64(key)}", {place}, '
            f'"_image": "{_base64(self._image % image)}", "_text": [{words}], "_fields": {{{fields}}}}}'
        )


def _base64(text: str) -> str:
    """Return a text as the value of a field of bytes, which tantivy decodes."""
    return b2a_base64(text.encode(), newline=False).decode()
