"""Column defaults: the SQL of a default gives its value, in exactly the type of the column."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from deltalake import QueryBuilder

from cdc.errors import ValueNotRepresentable
from pipelines.sinks.delta.column_defaults import default_expression, default_literal, new_defaults
from pipelines.sinks.delta.target_columns import RowShape
from pipelines.types.families import TypePolicy
from tests.contracts.folded import ID, ITEM, ORDERS, column

MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678_901)  # noqa: DTZ001 - a timestamp without a zone


@pytest.mark.parametrize(
    ("text", "arrow", "expected"),
    [
        ("t", pa.bool_(), True),
        ("f", pa.bool_(), False),
        ("-7", pa.int16(), -7),
        ("7", pa.int32(), 7),
        ("9223372036854775807", pa.int64(), 2**63 - 1),
        ("0.5", pa.float32(), 0.5),
        ("1e300", pa.float64(), 1e300),
        ("1.50", pa.decimal128(12, 2), Decimal("1.50")),
        ("2026-01-31", pa.date32(), date(2026, 1, 31)),
        ("it's", pa.string(), "it's"),
        ("", pa.string(), ""),
        ("\\x00ff", pa.binary(), b"\x00\xff"),
        ("2026-01-02 03:04:05.678901", pa.timestamp("us"), MOMENT),
        ("2026-01-02 03:04:05.678901+00", pa.timestamp("us", tz="UTC"), MOMENT.replace(tzinfo=UTC)),
        ("{1,NULL}", pa.list_(pa.int32()), [1, None]),
        ('{a,"b c",NULL}', pa.list_(pa.string()), ["a", "b c", None]),
    ],
)
def test_a_literal_gives_its_value_in_its_type(text: str, arrow: pa.DataType, expected: Any) -> None:
    found = pa.table(QueryBuilder().execute(f"select {default_literal(text, arrow)} as made"))["made"]

    assert found.to_pylist() == [expected]
    of_text = pa.types.is_string(arrow) or pa.types.is_binary(arrow) or pa.types.is_list(arrow)
    assert of_text or found.type == arrow


def test_a_default_that_the_type_cannot_hold_is_refused_without_its_value() -> None:
    tags = column(4, "tags", "integer[]", oid=1007)
    with pytest.raises(ValueNotRepresentable, match=r"the default of column 'tags' of type 'integer\[\]'") as caught:
        default_expression(tags, "{{12345}}", TypePolicy.EXACT)

    assert "12345" not in caught.value.message
    assert default_expression(tags, "{{12345}}", TypePolicy.TEXT) == "arrow_cast('{{12345}}', 'Utf8')"


def test_only_new_columns_with_a_default_have_an_expression() -> None:
    note, plain = column(4, "note", missing="n"), column(5, "plain")
    shape = RowShape(replace(ORDERS, columns=(ID, replace(ITEM, missing="i"), note, plain)), TypePolicy.EXACT)

    assert new_defaults(shape, [ID, ITEM]) == {"note": "arrow_cast('n', 'Utf8')"}
    assert set(new_defaults(shape, [])) == {"item", "note"}
