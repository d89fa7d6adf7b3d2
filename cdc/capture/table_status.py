"""Marks: the tables of the log that are not captured exactly any more, as status shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cdc.catalog import TableProgress
from cdc.catalog.tables import REFUSED
from cdc.table import TableSchema, TableState


def inexact_tables(known: Iterable[TableSchema], shown: Iterable[TableProgress], position: int) -> list[TableProgress]:
    """What has to be shown of the source's tables that are marked in the log, were and are no longer, or are not shown.

    `shown` is what stands there now. A dropped table whose name another one has by now is not shown.
    """
    latest: dict[str, TableSchema] = {}
    for schema in known:
        if schema.topic not in latest or latest[schema.topic].state is TableState.DROPPED:
            latest[schema.topic] = schema
    standing = {table.topic: table for table in shown if not table.sink}
    states = {state.value for state in TableState if state is not TableState.LIVE}
    found = []
    for topic, schema in latest.items():
        before = standing.get(topic, TableProgress("", topic, "streaming", None, position, None, 0))
        if before.state == REFUSED and schema.state is TableState.DROPPED:
            continue  # a rule matches it again
        if schema.state is not TableState.LIVE:
            found.append(replace(before, state=schema.state.value, reason=schema.reason, position=position))
        elif topic not in standing:  # the catalog is new
            found.append(before)
        elif before.state in {*states, REFUSED}:
            found.append(replace(before, state="streaming", reason=None, position=position))
    return found
