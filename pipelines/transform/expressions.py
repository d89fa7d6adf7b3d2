"""Expressions: computed columns and the filter of a rule, as Spark computes them over rows of a target.

Where a merge's source is in memory a small local frame is computed, which costs a tenth of a second; where it is a
frame it stays one. Both say the same SQL to the same engine, and each row is seen by itself.
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
from cdc.config.expression import BARE, named_in
from cdc.errors import TransformFailed
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

OP: Final = "_op"
_KEPT: Final = "_kept"
_PLACE: Final = "_place"
_PLACED: Final = re.compile(r"\bline (\d+),? pos(?:ition)? (\d+)")
_TELLING: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""PySpark's loggers that print the message of an error, with the value it is about, before anybody catches it."""
_ALONE: Final = frozenset({"LocalRelation", "LogicalRDD"})
"""What a plan stands on that sees each row by itself."""


@dataclass(frozen=True, slots=True)
class Expressions:
    """The expressions of one rule over one set of columns, found to be sound."""

    topic: str
    computed: tuple[tuple[str, str], ...]
    """(column, expression)."""
    where: str | None
    fields: pa.Schema
    """The computed columns as Spark types them."""
    reads: tuple[str, ...]
    """Columns that any of them reads."""
    decides: tuple[str, ...]
    """Columns that `where` reads."""

    def columns(self, held: pa.Schema) -> pa.Schema:
        """The target's columns: those that are held, the computed ones, the row's place."""
        places = [held.field(name) for name in (POSITION_COLUMN, ORDINAL_COLUMN)]
        return pa.schema([*list(held)[: -len(places)], *self.fields, *places])

    def finished(self, source: pa.Table, spark: SparkSession) -> pa.Table:
        """A merge's source with its computed columns; an upsert that is filtered out has become a delete.

        Raises TransformFailed for an expression that fails.
        """
        if not source.num_rows:
            made = self.fields.empty_table().append_column(OP, pa.array([], pa.string()))
        else:
            made = self._computed(source, spark)
        wanted = self.columns(pa.schema(field for field in source.schema if field.name != OP))
        held = {name: source[name] for name in source.column_names} | {name: made[name] for name in made.column_names}
        return pa.Table.from_arrays(
            [held[name] for name in (*wanted.names, OP)], schema=wanted.append(source.schema.field(OP))
        )

    def finished_frame(self, source: DataFrame) -> DataFrame:
        """As finished, on executors; fails with the frame."""
        from pyspark.sql import functions as F

        places = (POSITION_COLUMN, ORDINAL_COLUMN)
        held = [F.col(_quoted(name)) for name in source.columns if name not in {*places, OP}]
        return self._frame(source, [*held, *self._columns(), *(F.col(name) for name in places), self._op()])

    def _computed(self, source: pa.Table, spark: SparkSession) -> pa.Table:
        from pyspark.sql import functions as F

        rows = source.select([*self.reads, OP]).append_column(_PLACE, pa.array(range(source.num_rows), pa.int64()))
        with refusing(self.topic):
            frame = self._frame(spark.createDataFrame(rows), [*self._columns(), self._op(), F.col(_PLACE)])
            made = frame.toArrow().sort_by(_PLACE)
        return made.select([*self.fields.names, OP]).cast(self.fields.append(pa.field(OP, pa.string())))

    def _frame(self, source: DataFrame, columns: Iterable[Column]) -> DataFrame:
        return source.withColumn(_KEPT, self._kept()).select(*columns)

    def _kept(self) -> Column:
        from pyspark.sql import functions as F

        upsert = F.col(OP) == "u"
        return upsert if self.where is None else upsert & F.coalesce(F.expr(self.where), F.expr("false"))

    def _columns(self) -> Iterator[Column]:
        """Compute only for rows that pass the filter: an expression may fail on the rows that the filter excludes."""
        from pyspark.sql import functions as F

        return (F.when(F.col(_KEPT), F.expr(sql)).alias(name) for name, sql in self.computed)

    def _op(self) -> Column:
        from pyspark.sql import functions as F

        return F.when((F.col(OP) == "u") & ~F.col(_KEPT), "d").otherwise(F.col(OP)).alias(OP)

    def rejects(self, rows: pa.Table, spark: SparkSession) -> pa.ChunkedArray:
        """Which of the rows, that hold at least the columns of `decides`, are not in the target: bool."""
        named = rows.select(list(self.decides)).append_column(OP, pa.repeat(pa.scalar("u"), rows.num_rows))
        alone = Expressions(self.topic, (), self.where, pa.schema([]), self.decides, self.decides)
        return pc.equal(alone._computed(named, spark)[OP], "d")


def resolved(rule: Transform, held: pa.Schema, topic: str, spark: SparkSession) -> Expressions:
    """The expressions of a rule over the columns held; raises TransformFailed for one that is not sound."""
    frame = spark.createDataFrame(held.empty_table())
    computed = tuple(rule.computed.items())
    fields, reads = [], set()
    for name, sql in computed:
        field, read = _analysed(frame, name, sql, f"computed.{name} of table {topic!r}")
        fields.append(field)
        reads |= read
    decides: set[str] = set()
    if rule.where is not None:
        field, decides = _analysed(frame, _KEPT, rule.where, f"where of table {topic!r}")
        if not pa.types.is_boolean(field.type):
            raise TransformFailed(f"where of table {topic!r} is of type {field.type!s}: expected a condition")
    in_order = [name for name in held.names if name in reads | decides]
    return Expressions(
        topic, computed, rule.where, pa.schema(fields), tuple(in_order), tuple(n for n in in_order if n in decides)
    )


def _analysed(frame: DataFrame, name: str, sql: str, what: str) -> tuple[pa.Field, set[str]]:
    """(the column an expression makes, the columns it reads)."""
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import to_arrow_schema

    there = {column.casefold() for column in frame.columns}
    if bare := sorted({word for _, word, _ in named_in(sql) if word.lower() in BARE and word.casefold() not in there}):
        raise TransformFailed(
            f"{what}: {bare[0]!r} is not deterministic: its value would differ when the row is applied again"
        )
    with _refusing_to_resolve(what):
        made = frame.select(F.expr(sql).alias(name))
        plan = made._jdf.queryExecution().analyzed()  # noqa: SLF001 - what a column reads is said nowhere else
    alone = plan.nodeName() == "Project" and plan.child().nodeName() in _ALONE
    if not alone or not plan.deterministic():
        raise TransformFailed(f"{what}: expected a deterministic expression that computes one value from one row")
    (field,) = to_arrow_schema(made.schema, timezone="UTC")
    if pa.types.is_null(field.type) or pa.types.is_duration(field.type) or pa.types.is_interval(field.type):
        raise TransformFailed(f"{what} is of type {field.type!s}, which Delta does not have: cast it")
    read = plan.references().toSeq()
    # Spark names a column as the expression does, in whatever case
    named = {read.apply(place).name().casefold() for place in range(read.size())}
    return pa.field(name, field.type), {column for column in frame.columns if column.casefold() in named}


@contextmanager
def _refusing_to_resolve(what: str) -> Iterator[None]:
    from pyspark.errors import AnalysisException

    _hush()
    try:
        yield
    except AnalysisException as exc:
        place = _PLACED.search(str(exc))
        at = "" if place is None else f" at line {place[1]}, character {int(place[2]) + 1}"
        named: dict[str, Any] = exc.getMessageParameters() or {}
        about = f" {named['objectName']}" if "objectName" in named else ""
        raise TransformFailed(f"{what}: {exc.getCondition()}{about}{at}") from None


@contextmanager
def refusing(topic: str) -> Iterator[None]:
    """An expression that fails on a value raises TransformFailed; Spark's message holds the value, its class does not.

    Spark says it by an SQLSTATE of class 22, data exception; everything else is raised as it is.
    """
    from pyspark.errors import PySparkException

    _hush()
    try:
        yield
    except PySparkException as exc:
        if not (exc.getSqlState() or "").startswith("22"):
            raise
        said = exc.getCondition()
    else:
        return
    raise TransformFailed(f"an expression for table {topic!r} fails on a row: {said}")


def _hush() -> None:
    from pyspark.logger import PySparkLogger

    for name in _TELLING:
        PySparkLogger.getLogger(name).disabled = True


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
