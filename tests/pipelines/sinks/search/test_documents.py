"""Documents of a search index: the masked texts of a batch, and parked rows that the next commit stores."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import tantivy

from cdc.config import SearchRule
from cdc.targets.dead_letter_rows import Image, ParkedRow
from cdc.targets.published_record import Published, TableRecord
from cdc.targets.search_index_reader import DocumentRules, layout, parked_rows, stored_rules
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.sinks.search.documents import (
    DeadLetterDocuments,
    divide_rows,
    masked_upserts,
    on_disk,
    replace_reserved,
    rules_of_shape,
    rules_text,
)
from pipelines.sinks.search.row_documents import ROWS_AT_ONCE
from tests.contracts.folded import ORDERS, folded, gone, put

SCHEMA = pa.schema({"key": pa.list_(pa.string()), "after": pa.map_(pa.int32(), pa.string())})
MASKED = DocumentShapes(
    rules=(SearchRule.model_validate({"match": "*.*", "transform": {"mask": {"item": "redact"}}}),)
).of(ORDERS)


@pytest.mark.parametrize("count", [0, 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1])
def test_the_rows_of_a_batch_are_masked_whatever_their_number(count: int) -> None:
    rows = [gone(-1, 9), *(put(n, f"item {n}", 10 + n) for n in range(count))]
    deleted, upserts = divide_rows(folded(rows))
    found = pa.concat_tables(masked_upserts(upserts, MASKED))

    assert deleted == [["-1"]]
    assert found.column_names == ["key", "position", "ordinal", "1", "2", "3"]
    assert found["1"].to_pylist() == [str(n) for n in range(count)]
    assert set(found["2"].to_pylist()) == ({"***"} if count else set())
    assert found["position"].to_pylist() == [10 + n for n in range(count)]


def parked(key: str, image: Image) -> ParkedRow:
    return ParkedRow(
        relation=ORDERS.relation, topic=ORDERS.topic, key=(key,), position=5, ordinal=0, committed_at=0,
        image=image, complete=False, code="CDC-3002", message="no base", upto=10, first_at=0,
    )  # fmt: skip


def test_the_next_commit_stores_the_parked_rows_that_changed(tmp_path: Path) -> None:
    index, keys = tantivy.Index(layout(), str(tmp_path)), (("1",), ("2",))
    writer = index.writer(heap_size=15_000_000, num_threads=1)
    table = TableRecord(ORDERS.relation, ORDERS.topic, "", 10, None, "streaming", parked=keys)
    letters = DeadLetterDocuments()
    for rows in ({"1": {2: "a"}, "2": {2: "b"}}, {"1": {2: "a"}, "2": {2: "c"}}, {"2": {2: "c"}}):
        letters.confirm(ORDERS.relation, {(key,): parked(key, image) for key, image in rows.items()})
        letters.put(writer, ORDERS.relation)
        writer.commit()
        letters.committed([ORDERS.relation])
        index.reload()
        record = Published(10, 0, {ORDERS.relation: table})
        stored = parked_rows(index.searcher(), index.schema, record)[ORDERS.relation]
        assert {key[0]: dict(row.image) for key, row in stored.items() if row.image} == rows


def test_stored_rules_are_read_as_they_were_written(tmp_path: Path) -> None:
    index = tantivy.Index(layout(), str(tmp_path))
    writer = index.writer(heap_size=15_000_000, num_threads=1)
    rules = {1: rules_of_shape(MASKED), 2: DocumentRules.plain(ORDERS)}
    for count in range(2):
        replace_reserved(writer, "\0rules", rules_text(rules))
        writer.commit()
        index.reload()
        assert (stored_rules(index.searcher(), index.schema), index.searcher().num_docs) == (rules, 1), count
    assert [column.searched for column in rules[1].columns.values()] == [False, True, False]


def test_the_rows_of_all_parts_are_read_back(tmp_path: Path) -> None:
    parts = [
        pa.table({"key": [["1"], ["2"]], "after": [[(1, "a")], None]}, SCHEMA),
        pa.table({"key": [["3"]], "after": [[(1, "b")]]}, SCHEMA),
    ]

    rows = on_disk(parts, tmp_path)

    assert rows == pa.concat_tables(parts)
    assert list(tmp_path.iterdir()) == []


def test_the_rows_are_not_in_the_memory_of_arrow(tmp_path: Path) -> None:
    before = pa.total_allocated_bytes()

    rows = on_disk((pa.table({"number": range(start, start + 1_000)}) for start in range(0, 100_000, 1_000)), tmp_path)

    assert rows is not None
    assert rows.num_rows == 100_000
    assert pa.total_allocated_bytes() - before < 100_000


def test_no_parts_give_no_table(tmp_path: Path) -> None:
    assert on_disk([], tmp_path) is None
