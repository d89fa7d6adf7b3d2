"""Verification of views: each view is compared with its SQL, and each sink of views with the log of views.

The tables that the SQL reads are those of the sink at the cut from which the view was computed, so that the comparison
of this sink with the source completes the proof. A view that is computed at intervals is compared only if no table that
it reads has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import Definition
from cdc.config.views import NAME_OF_VIEWS, View
from cdc.log.computed_views import ComputedFrom, ComputedView
from cdc.log.reader import LogReader, log_exists
from cdc.position import Position
from cdc.table import TableSchema, TableState, matches_name
from cdc.targets.published_record import TargetState
from cdc.view_sql.view_query import queries_of
from pipelines.verification.compare_table import TableVerdict, refused
from pipelines.views.changed_rows import differences
from pipelines.views.kept_rows import view_rows
from pipelines.views.log_of_views import rows_of_view
from pipelines.views.view_inputs import InputRemoved, ViewInputs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_KINDS = {"c": "missing", "d": "extra", "u": "differing"}
"""Operation that would correct the log → kind of the mismatch."""


def compare_views(
    definition: Definition, wanted: tuple[str, ...], spark: Callable[[], SparkSession], listed: int
) -> Iterator[TableVerdict]:
    """Compare the rows of views in their log with their SQL. wanted: globs over the names; empty: all views."""
    selected = [view for view in definition.views if not wanted or matches_name(view.name, wanted)]
    if not log_exists(definition.log.of_views):
        yield from (_refused(view, "absent", "the view was not computed yet") for view in selected)
        return
    log = LogReader(definition.log.of_views)
    schemas = {schema.topic: schema for schema in log.schemas().values()}
    last = log.last_commit
    computed = ComputedFrom.from_json("" if last is None else last.views)
    for view in selected:
        schema, state = schemas.get(view.name), computed.views.get(view.name)
        if schema is None:
            yield _refused(view, "absent", "the view was not computed yet")
        elif state is None or schema.state is not TableState.LIVE:
            yield _refused(view, TargetState.FAILED, schema.reason or "the view is not complete")
        elif state.position != computed.cut:
            yield _refused(view, TargetState.CATCHING_UP, "its tables changed after it was computed as a whole")
        elif (expected := _expected_rows(definition, view, schema, state, spark)) is None:
            reason = "a table has removed the version that the view was computed from"
            yield _refused(view, TargetState.CATCHING_UP, reason)
        else:
            yield _verdict(view, rows_of_view(log, schema, log.durable or Position(0)), expected, listed)


def _expected_rows(
    definition: Definition, view: View, schema: TableSchema, state: ComputedView, spark: Callable[[], SparkSession]
) -> pa.Table | None:
    """Return the result of the SQL of a view; None if a version of a table that it reads was removed."""
    sink = definition.sink_of_view_inputs
    assert sink is not None  # noqa: S101 - the definition was checked
    query, inputs = queries_of(definition.views)[view.name], ViewInputs(spark(), sink)
    try:
        names = inputs.register(state.inputs, "verify")
        result = inputs.rows(query.whole(names))
    except InputRemoved:
        return None
    return view_rows(result, schema, state.floor)


def _verdict(view: View, present: pa.Table, expected: pa.Table, listed: int) -> TableVerdict:
    wrong = differences(present, expected)
    return TableVerdict(
        sink=NAME_OF_VIEWS,
        topic=view.name,
        equal=not wrong.num_rows,
        rows=expected.num_rows,
        target_rows=present.num_rows,
        compared=True,
        counts={_KINDS[one["values"]]: one["counts"] for one in wrong["op"].value_counts().to_pylist()},
        missing=_keys(wrong, "c", listed),
        extra=_keys(wrong, "d", listed),
        differing=[{"key": key, "columns": []} for key in _keys(wrong, "u", listed)],
    )


def _keys(wrong: pa.Table, operation: str, listed: int) -> list[Any]:
    found: list[Any] = wrong.filter(pc.equal(wrong["op"], operation))["key"].slice(0, listed).to_pylist()
    return found


def _refused(view: View, state: str, reason: str) -> TableVerdict:
    return refused(NAME_OF_VIEWS, view.name, state, reason)
