"""The inputs of views in Spark: tables of a Delta sink at a cut, some of their rows, or rows that the driver read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import functions as F

from cdc.config import DeltaSinkDefinition, rule_of, table_settings
from cdc.errors import DeltaJarMissing
from cdc.log.computed_views import InputVersion
from cdc.table import TableSchema
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, RELATION_COLUMN, column_name
from pipelines.sinks.delta.settings import type_policy
from pipelines.sinks.delta.spark_target import frame_at, frame_of, has_file_system
from pipelines.sinks.delta.target_layout import backticked
from pipelines.types.typed_rows import typed_keys
from pipelines.views.followed_inputs import FollowedInputs
from pipelines.views.needed_rows import RowsOfCuts
from pipelines.views.view_columns import result_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LISTED: Final = 500
"""Maximum number of keys that a condition lists; Delta and Parquet can then skip files and row groups."""
_IS_FIRST: Final = "_is_first"
FEW: Final = 20_000
"""Maximum rows of all inputs that one task joins: to distribute them would take longer."""
_ONE_TASK: Final[Mapping[str, str]] = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.leafNodeDefaultParallelism": "1",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
}
_CUTS: Final = "_cuts"
"""Column that says which cuts have a row."""
_EARLIER: Final = 1
_LATER: Final = 2
_REMOVED: Final = "FAILED_READ_FILE.FILE_NOT_EXIST"
"""In the text of Spark's error for a file that does not exist."""
OWN_COLUMNS: Final = (POSITION_COLUMN, ORDINAL_COLUMN, RELATION_COLUMN)
"""Columns of a target that views do not see."""


class InputRemoved(Exception):
    """A version of an input, or one of its files, was removed from the sink."""


class CutNames(NamedTuple):
    """The temporary views of the inputs at the earlier and the later cut of a step: topic → name."""

    before: dict[str, str]
    after: dict[str, str]
    are_few: bool = False
    """Whether they have few rows together."""


class ViewInputs:
    """Temporary views of the inputs in one Spark session."""

    def __init__(self, session: SparkSession, sink: DeltaSinkDefinition) -> None:
        self.session, self._sink = session, sink
        self._frames: dict[InputVersion, DataFrame] = {}
        self.followed = FollowedInputs()
        """The same inputs on the driver."""

    def register(self, versions: Mapping[str, InputVersion], side: str) -> dict[str, str]:
        """Create a temporary view of each input; return topic → its name. side: distinguishes the cuts in names.

        Raises InputRemoved, and DeltaJarMissing if Spark has no file system for an input.
        """
        names = {}
        for number, (topic, version) in enumerate(sorted(versions.items())):
            try:
                frame = self._frame(version)
            except AnalysisException as exc:
                raise InputRemoved(f"version {version.version} of table {topic!r}: {exc}") from exc
            names[topic] = f"input_{side}_{number}"
            frame.createOrReplaceTempView(names[topic])
        return names

    def register_cuts(self, rows: Mapping[str, RowsOfCuts]) -> CutNames:
        """Create temporary views of rows that the driver has read, of each topic one for the earlier and the later cut.

        Spark gets the rows of a topic once: to pass them takes longer than to filter them.
        """
        names = CutNames({}, {}, are_few=sum(len(part) for found in rows.values() for part in found) <= FEW)
        for number, (topic, found) in enumerate(sorted(rows.items())):
            parts = [found.both, found.earlier, found.later]
            cuts = np.repeat(np.array([_EARLIER | _LATER, _EARLIER, _LATER], np.int8), [len(part) for part in parts])
            frame = frame_of(self.session, pa.concat_tables(parts).append_column(_CUTS, pa.array(cuts)))
            for side, cut, named in (("a", _EARLIER, names.before), ("b", _LATER, names.after)):
                named[topic] = f"read_{side}_{number}"
                of_cut = frame.where(F.col(_CUTS).bitwiseAND(cut) != 0).drop(_CUTS)
                of_cut.createOrReplaceTempView(named[topic])
        return names

    def register_rows(self, table: str, keys: pa.Table, name: str) -> None:
        """Create the temporary view `name` of the rows of `table`, a temporary view, that have one of the keys."""
        frame = self.session.table(table)
        if keys.num_columns == 1 and keys.num_rows <= LISTED:
            (column,) = keys.column_names
            frame = frame.where(F.col(backticked(column)).isin(keys[column].to_pylist()))
        else:
            wanted = F.broadcast(frame_of(self.session, keys))
            frame = frame.join(wanted, on=[*keys.column_names], how="left_semi")
        frame.createOrReplaceTempView(name)

    def register_table(self, rows: pa.Table, name: str) -> None:
        """Create the temporary view `name` of these rows."""
        frame_of(self.session, rows).createOrReplaceTempView(name)

    def rows(self, sql: str, limit: int | None = None) -> pa.Table:
        """Run a query over the temporary views. limit: maximum number of rows to return. Raises InputRemoved."""
        with self.reading():
            result = self.session.sql(sql)
            return result_rows(result if limit is None else result.limit(limit))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise InputRemoved in the block if Spark does not find a file of an input."""
        try:
            yield
        except (Py4JJavaError, PySparkException) as exc:
            if _REMOVED not in str(exc):
                raise
            self._frames.clear()
            raise InputRemoved(f"a file of a table of sink {self._sink.name!r}") from None

    def both(self, one: str, other: str, *, are_few: bool = False) -> tuple[pa.Table, pa.Table]:
        """Run two queries with the same columns as one job, and return their rows. are_few: as in CutNames."""
        sql = f"SELECT true AS `{_IS_FIRST}`, * FROM ({one}) UNION ALL SELECT false, * FROM ({other})"
        with self._in_one_task() if are_few else nullcontext():
            rows = self.rows(sql)
        is_first, rows = rows[_IS_FIRST], rows.drop_columns([_IS_FIRST])
        return rows.filter(is_first), rows.filter(pc.invert(is_first))

    @contextmanager
    def _in_one_task(self) -> Iterator[None]:
        """Have Spark join and group in one task during the block."""
        conf = self.session.conf
        before = {name: conf.get(name, None) for name in _ONE_TASK}
        for name, value in _ONE_TASK.items():
            conf.set(name, value)
        try:
            yield
        finally:
            for name, earlier in before.items():
                if earlier is None:
                    conf.unset(name)
                else:
                    conf.set(name, earlier)

    def keep_only(self, versions: Mapping[str, InputVersion]) -> None:
        """Forget the frames of all other versions, and the changed rows."""
        self.followed.keep_only(versions)
        self._frames = {version: frame for version, frame in self._frames.items() if version in versions.values()}

    def typed_keys(self, keys: pa.Array, schema: TableSchema) -> pa.Table:
        """Return keys, which are lists of texts, with the names and types of the key columns of the target."""
        rule = rule_of(schema.topic, self._sink.rules)
        renamed = {} if rule is None or rule.transform is None else rule.transform.rename
        typed = typed_keys(keys, schema, type_policy(table_settings(schema.topic, self._sink, self._sink.rules)))
        return typed.rename_columns([column_name(renamed.get(column.name, column.name)) for column in schema.key])

    def _frame(self, version: InputVersion) -> DataFrame:
        if version not in self._frames:
            if not has_file_system(self.session, version.target):
                raise DeltaJarMissing(
                    f"views read tables of sink {self._sink.name!r} by Spark, but it has no Hadoop file system for "
                    f"target {version.target!r}",
                    remedy="add hadoop-aws (or the package of the store) to spark.conf, and restart the apply process",
                )
            rows = frame_at(self.session, version.target, version.version, [version.relation])
            self._frames[version] = rows.drop(*OWN_COLUMNS)
        return self._frames[version]
