"""Search index: terms of documents, queries for the rows of a table, and rows by column name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tantivy

from cdc.config import SearchRule, SearchSinkDefinition, Transform
from cdc.errors import ConfigError, CutUnavailable, SinkUnavailable, TargetRulesChanged
from cdc.targets.published_record import Published, TableRecord
from cdc.targets.search_index_reader import (
    PUBLISHED_ID,
    TERM_BYTES,
    DocumentRules,
    SearchIndex,
    decode_image,
    document_id,
    layout,
    parked_id,
    rows_of,
    stored_image,
)
from tests.contracts.folded import ID, ITEM, ORDERS, column

RECORD = Published(
    20, 0, {7: TableRecord(7, "shop.orders", "/index", 20, None, "streaming", schema=ORDERS.to_json().decode())}
)


def index_of(*rows: tuple[int, str, int], published: Published | None = RECORD) -> tantivy.Index:
    """An index in memory with rows: (relation, key, position)."""
    index = tantivy.Index(layout())
    writer = index.writer(heap_size=15_000_000, num_threads=1)
    for relation, key, position in rows:
        document = tantivy.Document()
        document.add_text("_id", document_id(relation, [key]))
        document.add_unsigned("_relation", relation)
        document.add_text("_topic", "shop.orders")
        document.add_bytes("_key", json.dumps([key]).encode())
        document.add_unsigned("_position", position)
        document.add_bytes("_image", json.dumps({"1": key, "2": f"item {key}"}).encode())
        document.add_text("_text", f"item {key}")
        writer.add_document(document)
    if published is not None:
        document = tantivy.Document()
        document.add_text("_id", PUBLISHED_ID)
        document.add_bytes("_image", published.to_json().encode())
        writer.add_document(document)
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    return index


def test_equal_keys_of_two_tables_are_two_terms_and_a_long_key_is_a_digest() -> None:
    long = "é" * TERM_BYTES
    terms = [document_id(relation, key) for relation in (1, 2) for key in (["a"], ["a", None], [long], [f"{long}x"])]

    assert len(set(terms)) == len(terms)
    assert max(len(term.encode()) for term in terms) <= TERM_BYTES
    assert document_id(1, ["a"]) == '1\0["a"]'
    assert parked_id(1, ["a"]) != document_id(1, ["a"])


@pytest.mark.parametrize(("below", "expected"), [(None, [10, 11]), (11, [10]), (10, [])])
def test_a_query_finds_the_rows_of_one_relation_before_a_position(below: int | None, expected: Sequence[int]) -> None:
    index = index_of((7, "1", 10), (7, "2", 11), (8, "1", 5))
    searcher = index.searcher()
    hits = searcher.search(rows_of(index.schema, 7, below), limit=9, count=False).hits

    assert sorted(searcher.doc(address)["_position"][0] for _, address in hits) == expected


def test_a_row_has_the_names_of_the_published_schema() -> None:
    found = SearchIndex(index_of((7, "1", 10), (7, "2", 11)))

    assert found.published == RECORD
    assert found.topics == {"shop.orders": 7}
    (row,) = found.search("shop.orders", "2")
    assert (row.key, row.position, row.source) == (("2",), 11, {"id": "2", "item": "item 2", "price": None})
    assert row.score > 0
    assert sorted(row.key[0] or "" for row in found.documents("shop.orders")) == ["1", "2"]


def test_a_table_that_was_not_published_has_no_rows() -> None:
    found = SearchIndex(index_of((7, "1", 10), published=None))

    assert (found.published, found.topics, found.parked()) == (None, {}, [])
    assert found.search("shop.orders", "1") == list(found.documents("shop.orders")) == []


def test_a_document_is_read_by_its_term() -> None:
    index = index_of((7, "1", 10))

    assert decode_image(stored_image(index.searcher(), index.schema, document_id(7, ["1"])) or b"") == {
        1: "1",
        2: "item 1",
    }
    assert stored_image(index.searcher(), index.schema, document_id(7, ["2"])) is None


def test_a_column_newer_than_the_row_has_its_default() -> None:
    wider = replace(ORDERS, columns=(ID, ITEM, column(9, "note", missing="none")))

    assert DocumentRules.plain(wider).named({1: "1", 2: "a"}) == {"id": "1", "item": "a", "note": "none"}
    assert DocumentRules.plain(wider).named({1: "1", 2: "a", 9: None})["note"] is None


def test_documents_of_other_rules_than_those_of_the_definition_are_an_error() -> None:
    found = SearchIndex(index_of((7, "1", 10)))
    plain = SearchSinkDefinition(type="search", name="find", path="/find")
    found.check_rules(7, plain)
    found.check_rules(99, plain)
    assert (found.differences(plain), found.column_names("shop.orders")) == ([], ["id", "item", "price"])
    masked = plain.model_copy(
        update={"rules": (SearchRule(match="shop.*", transform=Transform(mask={"item": "redact"})),)}
    )
    for changed in (masked, plain.model_copy(update={"fields": ("item",)})):
        with pytest.raises(TargetRulesChanged, match=r"in the index of sink .find. were written"):
            found.check_rules(7, changed)
        assert [topic for topic, _ in found.differences(changed)] == ["shop.orders"]
    other = masked.model_copy(update={"rules": (masked.rules[0].model_copy(update={"match": "shop.other"}),)})
    found.check_rules(7, other)


def test_a_missing_index_is_an_error_that_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(SinkUnavailable, match="no search index at"):
        SearchIndex.open(tmp_path / "index")


def test_pages_follow_each_other_until_the_order_of_the_index_changes() -> None:
    index = index_of(*((7, str(n), 10) for n in range(5)))
    reader = SearchIndex(index)
    first = reader.page("shop.orders", "item", 2)
    second = reader.page("shop.orders", "item", 2, first.next)
    last = reader.page("shop.orders", "item", 2, second.next)

    assert [row.key[0] for page in (first, second, last) for row in page.rows] == ["0", "1", "2", "3", "4"]
    assert last.next is None
    writer = index.writer(heap_size=15_000_000, num_threads=1)
    writer.delete_documents_by_term("_id", document_id(7, ["1"]))
    writer.commit()
    writer.wait_merging_threads()
    assert reader.page("shop.orders", "item", 2, first.next).rows == second.rows  # this reader does not see the commit
    with pytest.raises(CutUnavailable, match="reorganized"):
        reader.reopen().page("shop.orders", "item", 2, first.next)
    with pytest.raises(ConfigError, match="malformed page token"):
        reader.page("shop.orders", "item", 2, [0, "x"])
    assert reader.page("shop.none", "item", 2).rows == []
