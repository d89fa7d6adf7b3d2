"""Nulled values: what a column cannot represent is NULL where the definition says so, and it is counted."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.config import DeltaSinkDefinition
from cdc.config.delta_sink import Unrepresentable
from cdc.targets.lake_reader import read_target
from pipelines.dead_letters.quarantine import Quarantine
from pipelines.sinks.delta.kind import delta_settings
from pipelines.sinks.delta.settings import type_policy
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.types import TypePolicy, family_of
from pipelines.verification.canonical_text import without_unrepresentable
from pipelines.verification.expected_rows import ExpectedSchema
from tests.contracts.folded import ID, PRICE, batch, column, gone, put
from tests.contracts.folded import ORDERS as PLAIN

BORN = column(2, "born", "date", oid=1082)
DAYS = column(4, "days", "date[]", oid=1182)
ORDERS = replace(PLAIN, columns=(ID, BORN, PRICE, DAYS))
BAD_DATES = ["infinity", "-infinity", "0044-03-15 BC", "10000-01-01"]


def sink_definition(folder: Path, unrepresentable: object) -> DeltaSinkDefinition:
    keys = {"type": "delta", "name": "lake", "path": f"{folder}/{{schema}}/{{table}}"}
    return DeltaSinkDefinition.model_validate({**keys, "unrepresentable": unrepresentable})


def row(key: int, born: str, position: int, price: str = "1.00", days: str | None = None):
    return replace(put(key, born, position, price), after={1: str(key), 2: born, 3: price, 4: days})


@pytest.mark.parametrize("text", BAD_DATES)
def test_a_value_that_does_not_fit_is_null_and_its_neighbours_stay(text: str) -> None:
    family = family_of(BORN, TypePolicy.NULLED)
    texts = pa.array(["2026-01-02", text, None, "0001-01-01"])

    assert family.convert(texts).to_pylist() == [date(2026, 1, 2), None, None, date(1, 1, 1)]


def test_only_columns_that_cannot_represent_everything_become_text() -> None:
    kinds = {c.name: family_of(c, TypePolicy.LOSSLESS).arrow for c in ORDERS.columns}

    assert kinds == {"id": pa.int64(), "born": pa.string(), "price": pa.string(), "days": pa.string()}


def test_a_key_and_an_array_are_never_nulled() -> None:
    for refusing, text in ((replace(BORN, key=0), "infinity"), (DAYS, "{{2026-01-01}}")):
        with pytest.raises(pa.ArrowInvalid):
            family_of(refusing, TypePolicy.NULLED).convert(pa.array([text]))


@pytest.mark.parametrize(
    ("said", "policies"),
    [
        ("park", ["exact", "exact"]),
        (None, ["null", "null"]),
        ("text", ["lossless", "lossless"]),
        ({"born": None}, ["null", "exact"]),
        ({"born": "text", "price": "null"}, ["lossless", "null"]),
    ],
)
def test_a_sink_says_for_all_columns_or_for_single_ones_what_happens(
    tmp_path: Path, said: object, policies: list[str]
) -> None:
    policy = type_policy(delta_settings(sink_definition(tmp_path, said)).table)

    assert [policy.of(name).value for name in ("born", "price")] == policies


def test_a_target_has_null_where_a_value_does_not_fit_and_the_sink_counts(tmp_path: Path) -> None:
    definition = sink_definition(tmp_path, None)
    sink = DeltaSink(delta_settings(definition))
    sink.open("log-1")
    bad = [row(2 + n, text, 11 + n, price="NaN") for n, text in enumerate(BAD_DATES)]
    record = Quarantine(sink).apply(None, batch([row(1, "2026-01-02", 10), *bad, gone(9, 19)], 0, 20, ORDERS))
    rows = read_target(record.target).read_all().to_pydict()
    sink.close()

    assert record.parked == ()
    assert dict(zip(rows["id"], rows["born"], strict=True)) == {1: date(2026, 1, 2), **dict.fromkeys(range(2, 6))}
    assert (rows["price"].count(None), sink.nulled.total("shop.orders")) == (4, 8)
    assert (sink.nulled.pop_counts(), sink.nulled.pop_counts()) == ({"shop.orders": 8}, {})


def test_an_array_that_does_not_fit_is_parked_with_its_key(tmp_path: Path) -> None:
    sink = DeltaSink(delta_settings(sink_definition(tmp_path, "null")))
    sink.open("log-1")
    rows = [row(1, "infinity", 10), row(2, "2026-01-01", 11, days="{{2026-01-01},{2026-01-02}}")]
    record = Quarantine(sink).apply(None, batch(rows, 0, 20, ORDERS))
    sink.close()

    assert record.parked == (("2",),)


def test_verification_expects_null_in_the_same_places(tmp_path: Path) -> None:
    expected = ExpectedSchema.of(sink_definition(tmp_path, {"born": "null"}), ORDERS)
    texts = pa.array([*BAD_DATES, "2026-01-01", None, "9999-12-31", "0001-01-01"])

    assert expected.mask(BORN, pa.date32()) is without_unrepresentable
    assert expected.mask(BORN, pa.string()) is None
    assert expected.mask(PRICE, pa.decimal128(10, 2)) is None
    assert without_unrepresentable(texts).to_pylist() == [
        *[None] * 4,
        "2026-01-01",
        None,
        "9999-12-31",
        "0001-01-01",
    ]
    assert without_unrepresentable(pa.array(["NaN", "-1.50"])).to_pylist() == [None, "-1.50"]


def test_the_policy_of_a_definition_is_park_unless_it_says_more(tmp_path: Path) -> None:
    plain = DeltaSinkDefinition(type="delta", name="lake", path=f"{tmp_path}/{{schema}}/{{table}}")

    assert plain.unrepresentable is Unrepresentable.PARK
