"""Partial images that changed a key, in files of the log, and the rows of the old keys in older runs.

A run is compacted in parts, see `pipelines.folding.key_parts`. The unsent columns of such an image are in a row of the
old key. If that row is in the same range, both keys belong to one part. Otherwise the row is read from an older run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.compacted_table import Run
from cdc.log.disk_format import LogFile
from cdc.log.reader import read_file
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from pipelines.folding.key_parts import MOVE_SCHEMA, moves_as_texts

_MOVE_COLUMNS: Final = ["relation", "key", "old_key", "partial"]


def read_partial_moves(files: Iterable[LogFile], after: Position, upto: Position) -> pa.Table:
    """Return the updates in (after, upto] that change the key and have a partial image.

    The columns are relation, key and old_key. The values of a key are joined to one text.
    """
    # statistics rule out most files, two narrow columns most of the others
    with_moves = (
        file for file in files if file.partial and _has_moves(read_file(file, after, upto, ["partial", "old_key"]))
    )
    found = (moves_as_texts(read_file(file, after, upto, _MOVE_COLUMNS)) for file in with_moves)
    return pa.concat_tables([MOVE_SCHEMA.empty_table(), *found])


def _has_moves(rows: pa.Table) -> bool:
    return bool(pc.any(pc.and_(rows["partial"], pc.is_valid(rows["old_key"]))).as_py())


def read_base_rows(moves: pa.Table, runs: Sequence[Run]) -> pa.Table:
    """Read from the runs the rows of the old keys of `moves`, and all control rows `t` and `g` of their relations."""
    found = [LOG_SCHEMA.empty_table()]
    if not moves.num_rows:
        return found[0]
    relations, old_keys = moves["relation"].unique(), moves["old_key"].unique()
    bounds = pc.min_max(relations)
    for run in runs:
        if run.relations[0] <= bounds["max"].as_py() and bounds["min"].as_py() <= run.relations[1]:
            found += [_rows_of_keys(file, relations, old_keys) for file in run.files if not file.schemas_only]
    return pa.concat_tables(found)


def _rows_of_keys(file: LogFile, relations: pa.Array, keys: pa.Array) -> pa.Table:
    narrow = read_file(file, Position(0), file.last, ["relation", "op", "key"])
    is_fence = pc.is_in(narrow["op"], pa.array(["t", "g"]))
    has_key = pc.is_in(pc.binary_join(narrow["key"], "\0"), keys)
    wanted = pc.and_(pc.is_in(narrow["relation"], relations), pc.or_(is_fence, has_key))
    if not pc.any(wanted).as_py():
        return LOG_SCHEMA.empty_table()
    return read_file(file, Position(0), file.last).filter(wanted)
