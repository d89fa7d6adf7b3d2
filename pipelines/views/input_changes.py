"""Which inputs of views are complete at a cut, and which of their rows changed between two, from the change log."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import LogTrimmed
from cdc.log.computed_views import InputVersion
from cdc.log.reader import LogReader, read_file
from cdc.log_row import ROW_OPERATIONS, Operation
from cdc.position import Position
from cdc.targets.published_record import Published, TargetState
from pipelines.views.log_of_views import Cut

MOST: Final = 200_000
"""Maximum rows of the change log between two cuts; above, every row of the inputs may have changed."""
_COLUMNS: Final = ["op", "relation", "key", "old_key"]
_KEYS: Final = pa.list_(pa.field("element", pa.string()))
_EVERY_ROW: Final = pa.array([Operation.TRUNCATE.value, Operation.GENERATION.value])

KeysByRelation = Mapping[int, pa.Array | None]
"""Relation → distinct keys, as lists of texts, of its rows that may have changed; None: every row may have."""


def cut_of(record: Published) -> Cut:
    """Return the cut that a sink has published."""
    return Cut(Position(record.position), record.committed_at)


def usable_inputs(record: Published, topics: Collection[str]) -> dict[str, InputVersion]:
    """Return topic → version at a cut, for each of the topics that is complete there."""
    return {
        table.topic: InputVersion(table.target, table.version, table.relation, table.parked)
        for table in record.tables.values()
        if table.topic in topics and table.state == TargetState.STREAMING and table.version is not None
    }


def changed_keys(log: LogReader, after: Position, upto: Position, relations: Iterable[int]) -> KeysByRelation:
    """Return the keys of the rows that changed in (after, upto], for the given relations that have any.

    The caller refreshes the log reader.
    """
    relation_numbers = sorted(set(relations))
    try:
        files = log.files(after, upto)
        if after < log.oldest or sum(file.rows for file in files) > MOST:
            return dict.fromkeys(relation_numbers)
    except LogTrimmed:
        return dict.fromkeys(relation_numbers)
    parts = [read_file(file, after, upto, _COLUMNS) for file in files]
    if not parts:
        return {}
    rows = pa.concat_tables(parts)
    rows = rows.filter(pc.is_in(rows["relation"], pa.array(relation_numbers, pa.int64())))
    concerned = rows["relation"].unique().to_pylist()
    altered = _altered(log, after, upto) if pc.any(pc.equal(rows["op"], Operation.SCHEMA.value)).as_py() else set()
    return {relation: None if relation in altered else _keys_of(rows, relation) for relation in concerned}


def _keys_of(rows: pa.Table, relation: int) -> pa.Array | None:
    """Return the distinct keys of the changes of one relation; None if its changes do not say which rows changed."""
    own = rows.filter(pc.equal(rows["relation"], relation))
    if pc.any(pc.is_in(own["op"], _EVERY_ROW)).as_py():
        return None
    changes = own.filter(pc.is_in(own["op"], pa.array(sorted(ROW_OPERATIONS))))
    if changes["key"].null_count:  # a table without a key
        return None
    keys = pa.concat_arrays([*changes["key"].chunks, *changes["old_key"].drop_null().chunks, pa.array([], _KEYS)])
    return distinct(keys)


def distinct(keys: pa.Array) -> pa.Array:
    """Return each key once; a key is a list of texts."""
    texts = pc.binary_join(keys, "\0")
    numbered = pa.table({"text": texts, "row": pa.array(range(len(keys)), pa.int64())})
    first = numbered.group_by("text").aggregate([("row", "min")])["row_min"]
    return keys.take(first.combine_chunks())


def _altered(log: LogReader, after: Position, upto: Position) -> set[int]:
    """Return the relations whose columns changed between two positions, or that are new."""
    before, now = log.schemas(after), log.schemas(upto)
    return {
        relation
        for relation, schema in now.items()
        if relation not in before or before[relation].columns != schema.columns
    }
