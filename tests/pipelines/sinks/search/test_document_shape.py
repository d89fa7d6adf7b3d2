"""Document shape: which columns and masks a search sink's rules give to documents, and rules that cannot work."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pyarrow as pa
import pytest

from cdc.config import SearchRule, SearchSettings
from cdc.config.secret import Secret
from cdc.errors import CdcError, SchemaNotApplicable, TransformFailed
from cdc.table import TableSchema
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.types import TypePolicy
from tests.contracts.folded import ORDERS, column, folded, gone, part, put

ROWS = [put(1, "mug", 10), put(2, None, 11, price="2.50")]


def shapes(rule: dict[str, Any] | None = None, **sink: Any) -> DocumentShapes:
    rules = () if rule is None else (SearchRule.model_validate({"match": "shop.*", **rule}),)
    return DocumentShapes(SearchSettings(**sink), rules)


def documents(found: DocumentShapes, schema: TableSchema = ORDERS) -> list[dict[str, str | None]]:
    """The documents of ROWS, column name → text."""
    shape = found.of(schema)
    texts = [array.to_pylist() for array in shape.texts(folded(ROWS))]
    names = [column.name for column in shape.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*texts, strict=True)]


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({}, ["id", "item", "price"]),
        ({"column_list": ("id", "item")}, ["id", "item"]),
        ({"except_column_list": ("item",)}, ["id", "price"]),
        ({"fields": ("price",)}, ["id", "price"]),
        ({"column_list": ("id", "item"), "fields": ("price", "item")}, ["id", "item"]),
    ],
)
def test_documents_have_the_selected_columns_and_the_key(said, names):
    for found in (shapes(**said), shapes(said)):
        assert [list(document) for document in documents(found)] == [names, names]


def test_a_rule_overrides_the_keys_of_its_sink_and_inherits_the_others():
    found = shapes({"column_list": ("id", "item", "price")}, except_column_list=("item",), fields=("price",))
    assert list(documents(found)[0]) == ["id", "price"]
    assert list(documents(shapes({"fields": ()}, fields=("price",)))[0]) == ["id", "item", "price"]


def test_the_first_rule_that_matches_counts():
    rules = [SearchRule(match="shop.o*", fields=("item",)), SearchRule(match="*.*", fields=("price",))]
    assert list(documents(DocumentShapes(SearchSettings(), rules))[0]) == ["id", "item"]


def test_a_transform_drops_renames_and_masks():
    rule = {"transform": {"drop": ["price"], "rename": {"item": "what"}, "mask": {"item": "redact"}}}
    assert documents(shapes(rule)) == [{"id": "1", "what": "***"}, {"id": "2", "what": None}]


def test_a_number_is_masked_as_text():
    found = shapes({"transform": {"mask": {"price": "keep_last:2"}}})
    assert [document["price"] for document in documents(found)] == ["**00", "**50"]
    assert {c.name: c.type_name for c in found.of(ORDERS).columns} == {"id": "bigint", "item": "text", "price": "text"}


def test_typed_rows_have_the_same_columns_and_masks():
    found = DocumentShapes(SearchSettings(except_column_list=("item",)), policy_of=lambda _topic: TypePolicy.EXACT)
    rows = found.of(ORDERS).rows(folded(ROWS)).drop_columns(["_position", "_ordinal"]).to_pylist()
    assert [row["id"] for row in rows] == [1, 2]
    assert [list(row) for row in rows] == [["id", "price"]] * 2


def test_a_mask_may_name_a_column_that_is_no_field():
    assert list(documents(shapes({"fields": ("price",), "transform": {"mask": {"item": "redact"}}}))[0]) == [
        "id", "price",
    ]  # fmt: skip


def test_an_image_loses_hidden_columns_and_shows_masked_values_masked_once():
    shape = shapes({"except_column_list": ["price"], "transform": {"mask": {"item": "keep_last:1"}}}).of(ORDERS)
    parked = shape.parked_image({1: "7", 2: "secret", 3: "1.00", 99: "unknown"})
    assert parked == {1: "7", 2: "\0*****t"}
    assert shape.image({1: "7", 2: "secret", 3: "1.00", 99: "unknown"}) == {1: "7", 2: "*****t"}
    assert shape.image(parked) == {1: "7", 2: "*****t"}
    assert shape.parked_image(parked) == parked
    retried = shape.texts(folded([put(7, parked[2], 10)]))
    assert [array.to_pylist() for array in retried] == [["7"], ["*****t"]]


def test_a_default_of_older_rows_is_masked():
    schema = TableSchema(**{**_fields(ORDERS), "columns": (*ORDERS.columns, column(4, "note", missing="private"))})
    shape = shapes({"transform": {"mask": {"note": "redact"}}}).of(schema)
    assert shape.missing == {1: None, 2: None, 3: None, 4: "***"}
    assert shape.texts(folded(ROWS))[3].to_pylist() == ["***", "***"]


def _fields(schema: TableSchema) -> dict[str, Any]:
    return {name: getattr(schema, name) for name in ("relation", "oid", "schema", "name", "replica_identity")}


REFUSED: list[tuple[dict[str, Any], type[CdcError], str]] = [
    ({"column_list": ["item"]}, SchemaNotApplicable, "'id' .* is part of the key and cannot be excluded"),
    ({"except_column_list": ["id"]}, SchemaNotApplicable, "'id' .* is part of the key and cannot be excluded"),
    ({"transform": {"drop": ["id"]}}, TransformFailed, "'id' .* cannot be dropped or masked"),
    ({"transform": {"mask": {"id": "redact"}}}, TransformFailed, "'id' .* cannot be dropped or masked"),
    ({"transform": {"mask": {"nope": "redact"}}}, TransformFailed, "has no column 'nope'"),
    ({"transform": {"where": "id > 1"}}, TransformFailed, "'where', which a search sink cannot apply"),
    ({"transform": {"computed": {"more": "id + 1"}}}, TransformFailed, "'computed' .* a search sink cannot apply"),
]


@pytest.mark.parametrize(("rule", "error", "words"), REFUSED)
def test_a_rule_that_cannot_work_is_an_error_of_the_table(rule, error, words):
    with pytest.raises(error, match=words):
        shapes(rule).of(ORDERS)


def test_a_rule_that_names_an_unknown_column_is_an_error_of_a_new_table():
    for key in ("column_list", "except_column_list", "fields"):
        with pytest.raises(SchemaNotApplicable, match=f"{key}: table 'shop.orders' has no column 'nope'"):
            shapes({key: ["id", "nope"]}).check_named(ORDERS)
    shapes({"fields": ["item"]}).check_named(ORDERS)


def test_the_fingerprint_changes_with_the_rules_and_with_the_salt():
    rules: list[dict[str, Any]] = [{}, {"fields": ["item"]}, {"column_list": ["id", "item"]}]
    rules += [{"transform": {"mask": {"item": "redact"}}}, {"transform": {"rename": {"item": "what"}}}]
    found = [shapes(rule).of(ORDERS).fingerprint for rule in rules]
    found += [salted(salt).of(ORDERS).fingerprint for salt in ("pepper", "cumin")]
    assert len(set(found)) == len(found)
    assert shapes().of(ORDERS).fingerprint == shapes({}).of(ORDERS).fingerprint


def salted(salt: str) -> DocumentShapes:
    return shapes({"transform": {"mask": {"item": "sha256"}, "salt": Secret(salt, {"env": "SALT"})}})


def shout(rows: pa.Table) -> pa.Table:
    """Add a column, and drop the price."""
    lengths = pa.compute.utf8_length(rows["item"])
    return rows.drop_columns(["price"]).append_column("length", lengths)


def test_a_python_function_gets_masked_text_and_may_change_the_columns():
    rule = {"transform": {"mask": {"item": "keep_last:1"}, "python": f"{__name__}:shout"}}
    assert documents(shapes(rule)) == [
        {"id": "1", "item": "**g", "length": "3"},
        {"id": "2", "item": None, "length": None},
    ]
    shape = shapes(rule).of(ORDERS)
    assert shape.needs_complete_rows
    (added,) = [column for column in shape.columns if column.name == "length"]
    assert added.id < 0
    with pytest.raises(TransformFailed, match="needs complete rows"):
        shape.texts(folded([part(1, 10, {3: "1.00"})]))


def test_rows_without_a_key_or_before_a_python_function_are_not_parked():
    keyless = TableSchema(**{**_fields(ORDERS), "columns": ORDERS.columns[1:]})
    assert shapes({"transform": {"mask": {"item": "redact"}}}).parks_rows(ORDERS)
    assert not shapes().parks_rows(keyless)
    assert not shapes({"transform": {"python": f"{__name__}:shout"}}).parks_rows(ORDERS)


def nest(rows: pa.Table) -> pa.Table:
    return rows.append_column("nested", pa.array([{"a": 1}] * rows.num_rows))


def test_a_column_of_a_python_function_that_is_no_text_is_an_error():
    with pytest.raises(TransformFailed, match=r"a column of type struct.* cannot be stored as text"):
        documents(shapes({"transform": {"python": f"{__name__}:nest"}}))


def test_a_delete_has_no_texts_but_fits():
    assert [array.to_pylist() for array in shapes().of(ORDERS).texts(folded([gone(1, 10)]))] == [[None]] * 3


def test_sha256_is_keyed_with_the_salt():
    expected = hmac.digest(b"pepper", b"mug", hashlib.sha256).hex()
    assert documents(salted("pepper"))[0]["item"] == expected
