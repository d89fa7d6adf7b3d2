"""What DuckDB makes of the SQL of a view over the rows that the source of a ViewPipeline has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Final

import duckdb

from cdc.table import Column, TableSchema
from tests.pipelines.views.view_pipeline import ViewPipeline

_DIALECT: Final = {"LEFT SEMI JOIN": "SEMI JOIN", "LEFT ANTI JOIN": "ANTI JOIN", "<=>": "IS NOT DISTINCT FROM"}
"""What the SQL has in Spark → in DuckDB."""
_AVERAGE: Final = re.compile(r"\bavg\(([^()]*)\)")
_TYPES: Final = {"text": "VARCHAR", "double precision": "DOUBLE"}


def rows_by_duckdb(pipeline: ViewPipeline, sql: str) -> list[tuple[Any, ...]]:
    """The rows of a query over the tables of a pipeline, in any order."""
    with duckdb.connect(config={"threads": 1}) as engine:
        engine.create_function("exact_average", _average, ["DECIMAL(38,6)", "BIGINT"], "DECIMAL(38,6)")  # type: ignore[list-item,arg-type]
        for topic, schema in pipeline.schemas.items():
            engine.execute(f"CREATE SCHEMA IF NOT EXISTS {schema.schema}")
            engine.execute(f"CREATE TABLE {topic} ({', '.join(f'{c.name} {_type(c)}' for c in schema.columns)})")
            if found := list(pipeline.tables[topic].values()):
                places = ", ".join("?" * len(schema.columns))
                engine.executemany(f"INSERT INTO {topic} VALUES ({places})", found)
        for spark, duck in _DIALECT.items():
            sql = sql.replace(spark, duck)
        # DuckDB's own average is a floating-point number
        return engine.execute(_AVERAGE.sub(r"exact_average(sum(\1), count(\1))", sql)).fetchall()


def typed(schema: TableSchema, rows: Iterable[tuple[str | None, ...]]) -> set[tuple[Any, ...]]:
    """Rows of a log as Python has them from DuckDB; numbers are equal whatever their scale."""
    kinds = [column.type_name for column in schema.columns]
    return {tuple(_value(kind, text) for kind, text in zip(kinds, one, strict=True)) for one in rows}


def comparable(rows: Iterable[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """Rows from DuckDB in the form of `typed`."""
    return {tuple(v if v is None or isinstance(v, int | Decimal) else str(v) for v in one) for one in rows}


def _average(total: Decimal | None, count: int) -> Decimal | None:
    """The average as Spark rounds it: to four digits more than the two of the values."""
    if total is None:
        return None
    return (total / count).quantize(Decimal("0.000001"), ROUND_HALF_UP)


def _type(column: Column) -> str:
    if column.type_name == "numeric":
        return f"DECIMAL({(column.typmod - 4) >> 16}, {(column.typmod - 4) & 0xFFFF})"
    return _TYPES.get(column.type_name, column.type_name)


def _value(kind: str, text: str | None) -> Any:
    if text is None:
        return None
    if kind == "double precision":
        return str(float(text))
    return int(text) if kind in {"smallint", "integer", "bigint"} else Decimal(text) if kind == "numeric" else text
