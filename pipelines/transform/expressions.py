"""Expressions of a rule: `computed` columns and the filter `where`, which Spark evaluates over rows of a target.

The rows of a merge are an Arrow table or a Spark frame. Spark evaluates both with the same SQL. An Arrow table becomes
a local frame; evaluating it takes a tenth of a second. Every expression is deterministic and reads one row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import Transform
from cdc.config.sql_expression import BARE, named_in
from cdc.errors import TransformFailed
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.runtime.query_checks import changes_with_time

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

OP: Final = "_op"
_KEPT: Final = "_kept"
_ROW_NUMBER: Final = "_place"
_SQL_POSITION: Final = re.compile(r"\bline (\d+),? pos(?:ition)? (\d+)")
_VALUE_LOGGERS: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""PySpark's loggers that print the message of an error, with a value of a row, before our code can catch the error."""
_ROW_SOURCES: Final = frozenset({"LocalRelation", "LogicalRDD"})
"""Names of the leaf nodes of a Spark plan that reads only the given rows, and no table."""


@dataclass(frozen=True, slots=True)
class Expressions:
    """The checked SQL expressions of one rule, which use the columns of one table."""

    topic: str
    computed: tuple[tuple[str, str], ...]
    """Pairs (name of a computed column, its SQL expression)."""
    where: str | None
    fields: pa.Schema
    """Names and types of the computed columns, as Spark resolved them."""
    reads: tuple[str, ...]
    """Names of the columns that at least one expression reads."""
    decides: tuple[str, ...]
    """Names of the columns that the filter `where` reads."""

    def columns(self, schema: pa.Schema) -> pa.Schema:
        """Return `schema` with the computed columns inserted before its last columns, `_position` and `_ordinal`."""
        order = [schema.field(name) for name in (POSITION_COLUMN, ORDINAL_COLUMN)]
        return pa.schema([*list(schema)[: -len(order)], *self.fields, *order])

    def apply(self, source: pa.Table, spark: SparkSession) -> pa.Table:
        """Add the computed columns to the rows of a merge. Turn upserts that the filter `where` rejects into deletes.

        Raises TransformFailed if an expression fails on a row.
        """
        if not source.num_rows:
            computed = self.fields.empty_table().append_column(OP, pa.array([], pa.string()))
        else:
            computed = self._compute(source, spark)
        wanted = self.columns(pa.schema(field for field in source.schema if field.name != OP))
        columns = {name: source[name] for name in source.column_names}
        columns |= {name: computed[name] for name in computed.column_names}
        return pa.Table.from_arrays(
            [columns[name] for name in (*wanted.names, OP)], schema=wanted.append(source.schema.field(OP))
        )

    def apply_to_frame(self, source: DataFrame) -> DataFrame:
        """Do the same as `apply`, with the rows of a merge as a Spark frame.

        If an expression fails on a row, the error is raised only when Spark executes the frame.
        """
        from pyspark.sql import functions as F

        order = (POSITION_COLUMN, ORDINAL_COLUMN)
        given = [F.col(_quoted(name)) for name in source.columns if name not in {*order, OP}]
        return self._frame(source, [*given, *self._columns(), *(F.col(name) for name in order), self._op()])

    def decide(self, source: DataFrame, names: Iterable[str]) -> DataFrame:
        """Return columns of a frame and `_op`, which becomes `d` in upserts that the filter `where` rejects.

        source: must have `_op` and the columns that `decides` names. names: the columns to return.
        """
        from pyspark.sql import functions as F

        return self._frame(source, [*(F.col(_quoted(name)) for name in names), self._op()])

    def _compute(self, source: pa.Table, spark: SparkSession) -> pa.Table:
        from pyspark.sql import functions as F

        # Spark loses the rows after an empty chunk, see spark_target.frame_of
        rows = source.select([*self.reads, OP]).combine_chunks()
        rows = rows.append_column(_ROW_NUMBER, pa.array(range(source.num_rows), pa.int64()))
        with raising_transform_failed(self.topic):
            frame = self._frame(spark.createDataFrame(rows), [*self._columns(), self._op(), F.col(_ROW_NUMBER)])
            computed = frame.toArrow().sort_by(_ROW_NUMBER)
        return computed.select([*self.fields.names, OP]).cast(self.fields.append(pa.field(OP, pa.string())))

    def _frame(self, source: DataFrame, columns: Iterable[Column]) -> DataFrame:
        return source.withColumn(_KEPT, self._is_kept()).select(*columns)

    def _is_kept(self) -> Column:
        from pyspark.sql import functions as F

        upsert = F.col(OP) == "u"
        return upsert if self.where is None else upsert & F.coalesce(F.expr(self.where), F.expr("false"))

    def _columns(self) -> Iterator[Column]:
        """Yield the computed columns. Rows that the filter rejects get nulls, because an expression may fail on such a
        row.
        """
        from pyspark.sql import functions as F

        return (F.when(F.col(_KEPT), F.expr(sql)).alias(name) for name, sql in self.computed)

    def _op(self) -> Column:
        from pyspark.sql import functions as F

        return F.when((F.col(OP) == "u") & ~F.col(_KEPT), "d").otherwise(F.col(OP)).alias(OP)

    def rejects(self, rows: pa.Table, spark: SparkSession) -> pa.ChunkedArray:
        """Return one bool per row: whether the filter `where` rejects the row.

        rows: must have at least the columns that `decides` names.
        """
        decisive = rows.select(list(self.decides)).append_column(OP, pa.repeat(pa.scalar("u"), rows.num_rows))
        filter_only = Expressions(self.topic, (), self.where, pa.schema([]), self.decides, self.decides)
        return pc.equal(filter_only._compute(decisive, spark)[OP], "d")


def resolve_expressions(rule: Transform, schema: pa.Schema, topic: str, spark: SparkSession) -> Expressions:
    """Check the expressions of a rule, and return them for a table with the columns of `schema`.

    Raises TransformFailed for an invalid expression.

    schema: the columns that the expressions may use. topic: the table's name, for errors.
    """
    frame = spark.createDataFrame(schema.empty_table())
    computed = tuple(rule.computed.items())
    fields, reads = [], set()
    for name, sql in computed:
        field, read = _analyse(frame, name, sql, f"computed.{name} of table {topic!r}")
        fields.append(field)
        reads |= read
    decides: set[str] = set()
    if rule.where is not None:
        field, decides = _analyse(frame, _KEPT, rule.where, f"'where' of table {topic!r}")
        if not pa.types.is_boolean(field.type):
            raise TransformFailed(f"'where' of table {topic!r} has type {field.type!s}: expected a condition")
    in_order = [name for name in schema.names if name in reads | decides]
    return Expressions(
        topic, computed, rule.where, pa.schema(fields), tuple(in_order), tuple(n for n in in_order if n in decides)
    )


def _analyse(frame: DataFrame, name: str, sql: str, what: str) -> tuple[pa.Field, set[str]]:
    """Check an expression; return the Arrow field of its result, and the columns that it reads.

    what: the name of the expression in errors.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import to_arrow_schema

    columns = {column.casefold() for column in frame.columns}
    if bare := sorted(
        {word for _, word, _ in named_in(sql) if word.lower() in BARE and word.casefold() not in columns}
    ):
        raise TransformFailed(f"{what} uses {bare[0]!r}, whose value would differ if the row were applied again")
    with _raising_analysis_errors(what):
        selected = frame.select(F.expr(sql).alias(name))
        plan = selected._jdf.queryExecution().analyzed()  # noqa: SLF001 - only the plan names the columns that are read
    reads_one_row = plan.nodeName() == "Project" and plan.child().nodeName() in _ROW_SOURCES
    if not reads_one_row or changes_with_time(selected):
        raise TransformFailed(f"{what}: expected a deterministic expression that computes one value from one row")
    (field,) = to_arrow_schema(selected.schema, timezone="UTC")
    if pa.types.is_null(field.type) or pa.types.is_duration(field.type) or pa.types.is_interval(field.type):
        raise TransformFailed(f"{what} has type {field.type!s}, but Delta has no such type: add a cast")
    read = plan.references().toSeq()
    # Spark names a column as the expression does, in any case
    named = {read.apply(number).name().casefold() for number in range(read.size())}
    return pa.field(name, field.type), {column for column in frame.columns if column.casefold() in named}


@contextmanager
def _raising_analysis_errors(what: str) -> Iterator[None]:
    from pyspark.errors import AnalysisException

    _disable_value_loggers()
    try:
        yield
    except AnalysisException as exc:
        place = _SQL_POSITION.search(str(exc))
        at = "" if place is None else f" at line {place[1]}, character {int(place[2]) + 1}"
        named: dict[str, Any] = exc.getMessageParameters() or {}
        about = f" {named['objectName']}" if "objectName" in named else ""
        raise TransformFailed(f"{what} is invalid: {exc.getCondition()}{about}{at}") from None


@contextmanager
def raising_transform_failed(topic: str) -> Iterator[None]:
    """Convert Spark's data exceptions (SQLSTATE class 22), which an expression raises on a row, to TransformFailed.

    TransformFailed contains Spark's error condition. It omits Spark's message, because the message contains the value.
    Other errors pass unchanged.
    """
    from pyspark.errors import PySparkException

    _disable_value_loggers()
    try:
        yield
    except PySparkException as exc:
        if not (exc.getSqlState() or "").startswith("22"):
            raise
        condition = exc.getCondition()
    else:
        return
    raise TransformFailed(f"an expression in the rule of table {topic!r} failed on a row: {condition}")


def _disable_value_loggers() -> None:
    from pyspark.logger import PySparkLogger

    for name in _VALUE_LOGGERS:
        PySparkLogger.getLogger(name).disabled = True


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
