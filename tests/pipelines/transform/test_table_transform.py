"""TableTransform: dropped, renamed and masked columns and Python functions, without a store and without Spark."""

from __future__ import annotations

import hashlib
import hmac
import pickle
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from cdc.config import Secret, Transform
from cdc.errors import TransformFailed
from cdc.table import Column
from pipelines.transform.table_transform import TableTransform
from pipelines.types.families import TypePolicy
from tests.contracts.folded import ID, ITEM, ORDERS, PRICE, column, folded, part, put

SALT = Secret("pepper", {"env": "SALT"})
POLICY = TypePolicy.EXACT


def hashed(text: str) -> str:
    return hmac.new(b"pepper", text.encode(), hashlib.sha256).hexdigest()


def ruled(columns: tuple[Column, ...] = ORDERS.columns, **rule) -> TableTransform:
    return TableTransform.of(Transform.model_validate(rule), replace(ORDERS, columns=columns))


def rows_of(transform: TableTransform, *rows) -> list[dict[str, Any]]:
    typed = transform.rows(folded(list(rows)), POLICY)
    assert typed.schema == transform.row_schema(POLICY)
    return typed.drop_columns(["_position", "_ordinal"]).to_pylist()


def test_a_mask_does_not_show_its_salt() -> None:
    assert "pepper" not in repr(ruled(mask={"item": "sha256"}, salt=SALT))


def test_columns_are_dropped_renamed_and_masked_as_postgres_prints_them() -> None:
    transform = ruled(drop=["item"], rename={"price": "cost", "id": "number"}, mask={"price": "sha256"}, salt=SALT)

    assert rows_of(transform, put(7, "gone", 10, price="1.50")) == [{"number": 7, "cost": hashed("1.50")}]
    assert [c.name for c in transform.schema.key] == ["number"]


def test_a_dropped_or_masked_value_cannot_stop_the_table() -> None:
    transform = ruled((ID, replace(PRICE, id=2), PRICE), drop=["price"])  # both are called price
    assert rows_of(transform, put(1, "not a number", 10)) == [{"id": 1}]

    assert rows_of(ruled(mask={"price": "redact"}), put(1, "a", 10, price="NaN"))[0]["price"] == "***"


def test_the_default_of_a_masked_column_is_masked() -> None:
    note = column(4, "note", missing="private")
    transform = ruled((*ORDERS.columns, note), mask={"note": "redact"})

    assert rows_of(transform, put(1, "a", 10))[0]["note"] == "***"
    assert transform.missing(note) == "***"
    assert ruled((*ORDERS.columns, note)).missing(note) == "private"


def test_an_image_without_dropped_columns_only_is_complete() -> None:
    images = folded([part(1, 10, {3: "2.00"}), part(2, 10, {2: "b"})])

    assert ruled(drop=["item"]).settled(images)["complete"].to_pylist() == [True, False]
    assert ruled().settled(images)["complete"].to_pylist() == [False, False]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"drop": ["nope"]}, "drop: table 'shop.orders' has no column 'nope'"),
        ({"rename": {"nope": "a"}}, "rename: table 'shop.orders' has no column 'nope'"),
        ({"mask": {"nope": "redact"}}, "mask: table 'shop.orders' has no column 'nope'"),
        (
            {"drop": ["computed"]},
            "drop: table 'shop.orders' has no column 'computed', or the publication does not send this column",
        ),
        ({"drop": ["id"]}, "column 'id' of table .* is part of the key"),
        ({"mask": {"id": "redact"}}, "column 'id' of table .* is part of the key"),
        ({"rename": {"item": "Price"}}, "would have the name 'price'"),
        ({"computed": {"ITEM": "1"}}, "would have the name 'item'"),
        ({"python": "tests.pipelines.transform.test_table_transform:nothing"}, "cannot be imported"),
        ({"python": "no.such.module:nothing"}, "cannot be imported"),
    ],
)
def test_a_rule_that_does_not_fit_the_table_is_refused(rule: dict[str, Any], words: str) -> None:
    with pytest.raises(TransformFailed, match=words):
        ruled((*ORDERS.columns, column(9, "computed", generated=True)), **rule).row_schema(POLICY)


def test_a_column_that_takes_the_name_of_a_dropped_one_is_no_collision() -> None:
    assert rows_of(ruled(drop=["item"], rename={"price": "item"}), put(1, "a", 10)) == [
        {"id": 1, "item": _price("1.00")}
    ]


def test_a_table_without_a_key_has_no_computed_columns() -> None:
    with pytest.raises(TransformFailed, match="has no key"):
        ruled((replace(ID, key=None), ITEM), where="id > 1")


def _price(text: str):
    return pa.array([text]).cast(pa.decimal128(10, 2))[0].as_py()


def shouted(rows: pa.Table) -> pa.Table:
    return rows.set_column(1, "item", pa.compute.utf8_upper(rows["item"])).append_column(
        "length", pa.compute.utf8_length(rows["item"])
    )


def shortened(rows: pa.Table) -> pa.Table:
    return rows.slice(1)


def keyless(rows: pa.Table) -> pa.Table:
    return rows.drop_columns(["id"])


def failing(rows: pa.Table) -> pa.Table:
    raise ValueError(rows["item"].to_pylist())


def test_a_function_changes_the_columns_of_complete_rows() -> None:
    transform = ruled(python=f"{__name__}:shouted", drop=["price"])

    assert rows_of(transform, put(1, "abc", 10)) == [{"id": 1, "item": "ABC", "length": 3}]
    assert transform.row_schema(POLICY).field("item").metadata == ruled().row_schema(POLICY).field("item").metadata


def test_a_function_is_not_called_with_partial_images() -> None:
    with pytest.raises(TransformFailed, match="needs complete rows") as refused:
        ruled(python=f"{__name__}:shouted").rows(folded([part(1, 10, {3: "1.00"})]), POLICY)
    assert "REPLICA IDENTITY FULL" in refused.value.fix


@pytest.mark.parametrize(
    ("name", "words"),
    [("shortened", "one row for each given row"), ("keyless", "the key column 'id'"), ("failing", "ValueError")],
)
def test_the_error_of_a_wrong_function_contains_no_value(name: str, words: str) -> None:
    with pytest.raises(TransformFailed, match=words) as refused:
        ruled(python=f"{__name__}:{name}").rows(folded([put(1, "private", 10)]), POLICY)
    assert "private" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_fingerprints_differ_by_rule_and_salt() -> None:
    rules: list[dict[str, Any]] = [
        {},
        {"drop": ["item"]},
        {"mask": {"item": "sha256"}, "salt": SALT},
        {"where": "id > 1"},
    ]
    rules.append({"mask": {"item": "sha256"}, "salt": Secret("other", {"env": "SALT"})})
    found = [ruled(**rule).fingerprint for rule in rules]

    assert len(set(found)) == len(rules)
    assert [ruled(**rule).fingerprint for rule in rules] == found


def test_a_transform_can_be_pickled() -> None:
    transform = ruled(mask={"item": "sha256"}, salt=SALT)

    assert rows_of(pickle.loads(pickle.dumps(transform)), put(1, "a", 10))[0]["item"] == hashed("a")
