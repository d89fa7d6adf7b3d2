"""Expressions of a rule, evaluated by Spark over rows of a merge."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc.config import Transform
from cdc.errors import TransformFailed
from pipelines.transform.expressions import OP, Expressions, resolve_expressions
from pipelines.types import TypePolicy
from pipelines.types.typed_rows import target_schema, typed_rows
from tests.contracts.folded import ORDERS, Row, folded, put


def resolved(spark: SparkSession, **rule: object) -> Expressions:
    schema = target_schema(ORDERS, TypePolicy.EXACT)
    return resolve_expressions(Transform.model_validate(rule), schema, ORDERS.topic, spark)


def upserts(*rows: Row) -> pa.Table:
    typed = typed_rows(folded(list(rows)), ORDERS, TypePolicy.EXACT)
    return typed.append_column(OP, pa.repeat(pa.scalar("u"), typed.num_rows))


def test_computed_columns_are_added_and_filtered_rows_become_deletes(spark: SparkSession) -> None:
    expressions = resolved(spark, computed={"loud": "upper(item)"}, where="id > 1")
    assert (expressions.reads, expressions.decides) == (("id", "item"), ("id",))

    applied = expressions.apply(upserts(put(1, "a", 10), put(2, "b", 11)), spark)
    assert applied.column_names == ["id", "item", "price", "loud", "_position", "_ordinal", OP]
    assert list(zip(*(applied[name].to_pylist() for name in ("id", "loud", OP)), strict=True)) == [
        (1, None, "d"),
        (2, "B", "u"),
    ]
    assert expressions.rejects(upserts(put(1, "a", 10), put(2, "b", 11)), spark).to_pylist() == [True, False]


def test_rows_after_an_empty_chunk_are_computed_too(spark: SparkSession) -> None:
    expressions = resolved(spark, computed={"loud": "upper(item)"})
    first, last = upserts(put(1, "a", 10)), upserts(put(2, "b", 11))
    applied = expressions.apply(pa.concat_tables([first, last.slice(0, 0), last]), spark)

    assert applied["loud"].to_pylist() == ["A", "B"]


def test_an_expression_that_fails_on_a_row_is_an_error_without_its_value(spark: SparkSession) -> None:
    expressions = resolved(spark, computed={"number": "cast(item as int)"})
    with pytest.raises(TransformFailed, match="failed on a row: CAST_INVALID_INPUT") as caught:
        expressions.apply(upserts(put(1, "private", 10)), spark)

    assert "private" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"computed": {"x": "nope + 1"}}, "computed.x .*UNRESOLVED_COLUMN"),
        ({"where": "item"}, "expected a condition"),
        ({"where": "cast(item AS date) < 'today'"}, "expected a deterministic expression"),
        ({"computed": {"x": "to_date(concat('to', 'morrow'))"}}, "expected a deterministic expression"),
    ],
)
def test_an_invalid_expression_is_refused(spark: SparkSession, rule: dict[str, object], words: str) -> None:
    with pytest.raises(TransformFailed, match=words):
        resolved(spark, **rule)
