"""Row documents of a tantivy index: what their JSON says, and what tantivy makes of it."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tantivy
from hypothesis import given
from hypothesis import strategies as st

from cdc.targets.search_index_reader import IndexedColumn, decode_image, document_id, layout, stored_image
from pipelines.sinks.search.row_documents import BYTES_AT_ONCE, ROWS_AT_ONCE, RowDocuments, row_parts, rows_schema

COLUMNS = {
    7: IndexedColumn("id", searched=False),
    3: IndexedColumn('a "name" é'),
    9: IndexedColumn("note"),
    4: IndexedColumn("price", searched=False),
}
DOCUMENTS = RowDocuments("shop.orders", 16384, COLUMNS)
TEXTS = st.none() | st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from('"\\\n\r\t\x07\x1f\x7f')), max_size=6
)
ROWS = st.lists(st.tuples(st.lists(TEXTS, min_size=1, max_size=2), *[TEXTS] * len(COLUMNS)), min_size=1, max_size=5)


def table(rows: Sequence[Sequence[Any]], columns: Sequence[int] = tuple(COLUMNS)) -> pa.Table:
    """rows: key, then texts."""
    whole = [(key, 10 + number, number, *texts) for number, (key, *texts) in enumerate(rows)]
    schema = rows_schema(columns)
    return pa.table(dict(zip(schema.names, zip(*whole, strict=True), strict=True)), schema)


def documents(rows: pa.Table, made: RowDocuments = DOCUMENTS) -> list[dict[str, Any]]:
    return [json.loads(text) for part in row_parts(rows) for text in made.of(part)[1]]


@given(ROWS)
def test_a_document_has_the_row_whatever_its_texts_are(rows: list[Any]) -> None:
    assert DOCUMENTS.of(table(rows))[0] == [document_id(16384, key) for key, *_ in rows]
    for number, (found, (key, *texts)) in enumerate(zip(documents(table(rows)), rows, strict=True)):
        searched = {c.name: t for c, t in zip(COLUMNS.values(), texts, strict=True) if c.searched and t is not None}
        assert found["_id"] == document_id(16384, key)
        assert [found[name] for name in ("_relation", "_topic")] == [16384, "shop.orders"]
        assert [found[name] for name in ("_position", "_ordinal")] == [10 + number, number]
        assert json.loads(b64decode(found["_key"])) == key
        assert list(decode_image(b64decode(found["_image"])).items()) == list(zip(COLUMNS, texts, strict=True))
        assert found["_text"] == list(searched.values())
        assert found["_fields"] == {name: f" {text}" for name, text in searched.items()}


def test_a_later_part_of_many_rows_has_its_own_rows() -> None:
    """Only the first row has a text that must be escaped, so the rows of the second part are built without Python."""
    rows = table([([str(number)], str(number), None, "\n" if number == 0 else "x", "1") for number in range(4_100)])
    last = documents(rows)[ROWS_AT_ONCE:]

    assert [found["_id"] for found in last] == [document_id(16384, [str(number)]) for number in range(4_096, 4_100)]
    assert [decode_image(b64decode(found["_image"]))[7] for found in last] == ["4096", "4097", "4098", "4099"]
    assert [found["_text"] for found in last] == [["x"]] * 4


@pytest.mark.parametrize("key", [["k" * 60_001, None], ['"' * 20_000 + "\\", "1"]])
def test_a_key_that_is_too_long_for_a_term_has_the_id_of_its_digest(key: list[str | None]) -> None:
    rows = table([(key, "1", "a", "b", "2"), (["1"], "1", "a", "b", "2")])
    ids, texts = DOCUMENTS.of(rows)

    assert ids == [document_id(16384, key), document_id(16384, ["1"])]
    assert [json.loads(text)["_id"] for text in texts] == ids


def test_a_table_without_columns_has_documents() -> None:
    (found,) = documents(table([(["1"],)], ()), RowDocuments("shop.orders", 1, {}))

    assert (b64decode(found["_image"]), found["_text"], found["_fields"]) == (b"{}", [], {})


def test_tantivy_finds_and_returns_what_the_rows_have(tmp_path: Path) -> None:
    """Among others, a text that begins like a time which does not exist."""
    texts = ["2026-99-99T99:99:99Z ends", 'he said "ends"\n\x07 é', None]
    rows = table([([str(number)], str(number), text, None, "1.5") for number, text in enumerate(texts)])
    index = tantivy.Index(layout(), str(tmp_path))
    writer = index.writer(heap_size=15_000_000, num_threads=1)
    for document in DOCUMENTS.of(rows)[1]:
        writer.add_json(document)
    writer.commit()
    index.reload()
    searcher, schema = index.searcher(), index.schema

    for number, text in enumerate(texts):
        stored = stored_image(searcher, schema, document_id(16384, [str(number)]))
        assert stored is not None
        assert decode_image(stored) == {7: str(number), 3: text, 9: None, 4: "1.5"}
    for words, count in {"ends": 2, "said": 1, 'note:"said"': 0, '"he said"': 1, "1.5": 0}.items():
        query, _ = index.parse_query_lenient(words, ["_text", "_fields"], conjunction_by_default=True)
        assert searcher.search(query, count=True).count == count, words


@pytest.mark.parametrize(
    ("texts", "sizes"),
    [([], []), (["a"] * (ROWS_AT_ONCE + 3), [ROWS_AT_ONCE, 3]), (["a" * (BYTES_AT_ONCE // 2 + 1)] * 3, [1, 1, 1])],
    ids=["none", "many", "large"],
)
def test_rows_are_divided_by_their_number_and_size(texts: list[str], sizes: list[int]) -> None:
    rows = pa.table({"text": pa.array(texts, pa.string())})
    parts = list(row_parts(rows))

    assert [part.num_rows for part in parts] == sizes
    assert pa.concat_tables(parts or [rows]) == rows
