"""Rows of a Delta checkpoint, made from the rows of an earlier checkpoint and from the commits after it.

delta-rs makes the same rows, but it opens the table for this: 100 ms of CPU. Here the cost is that of the new commits,
because the rows of the earlier checkpoint are not converted to Python objects. The result has no columns for parsed
statistics and no sidecar files; the Delta protocol requires neither.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc.delta_protocol.actions import Action

_TEXT, _NUMBER, _FLAG = pa.string(), pa.int64(), pa.bool_()
_MAP: Final = pa.map_(_TEXT, _TEXT)
_TEXTS: Final = pa.list_(pa.field("element", _TEXT))
_VECTOR: Final = {
    "storageType": _TEXT,
    "pathOrInlineDv": _TEXT,
    "offset": pa.int32(),
    "sizeInBytes": pa.int32(),
    "cardinality": _NUMBER,
}
_FILE: Final = {
    "path": _TEXT,
    "partitionValues": _MAP,
    "size": _NUMBER,
    "dataChange": _FLAG,
    "tags": _MAP,
    "deletionVector": pa.struct(_VECTOR),
}
_KINDS: Final = {
    "protocol": pa.struct(
        {
            "minReaderVersion": pa.int32(),
            "minWriterVersion": pa.int32(),
            "readerFeatures": _TEXTS,
            "writerFeatures": _TEXTS,
        }
    ),
    "metaData": pa.struct(
        {
            "id": _TEXT,
            "name": _TEXT,
            "description": _TEXT,
            "format": pa.struct({"provider": _TEXT, "options": _MAP}),
            "schemaString": _TEXT,
            "partitionColumns": _TEXTS,
            "createdTime": _NUMBER,
            "configuration": _MAP,
        }
    ),
    "txn": pa.struct({"appId": _TEXT, "version": _NUMBER, "lastUpdated": _NUMBER}),
    "add": pa.struct({**_FILE, "modificationTime": _NUMBER, "stats": _TEXT}),
    "remove": pa.struct({**_FILE, "deletionTimestamp": _NUMBER, "extendedFileMetadata": _FLAG}),
}
SCHEMA: Final = pa.schema([pa.field(kind, columns) for kind, columns in _KINDS.items()])
"""The columns of a checkpoint, one for each kind of action. Each row has a value in exactly one of them.

All fields may be null, as in checkpoints of Spark.
"""
_MAPS: Final = frozenset({"partitionValues", "tags", "configuration"})
"""Fields that are JSON objects in a commit, and maps in a checkpoint."""
_LEFT_OUT: Final = frozenset({"stats", "stats_parsed", "partitionValues_parsed"})
"""Fields that a checkpoint may be without: statistics of removed files, and columns whose values `add` has as text."""
_ALLOWED: Final = {kind: _LEFT_OUT.union(field.name for field in columns) for kind, columns in _KINDS.items()}
RETENTION: Final = "delta.deletedFileRetentionDuration"
"""Table property with the time for which a VACUUM needs the `remove` action of a file."""
_DEFAULTS: Final[Mapping[str, Action]] = {
    "protocol": {},
    "metaData": {"format": {"provider": "parquet"}, "partitionColumns": [], "configuration": {}},
    "txn": {},
    "add": {"partitionValues": {}},
    "remove": {},
}
"""Values of required fields that an action of a commit may omit."""
_UNITS: Final = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}
_INTERVAL: Final = re.compile(rf"\s*interval\s+(\d+)\s+({'|'.join(_UNITS)})s?\s*\Z", re.IGNORECASE)

_Key = tuple[str, ...]
"""What an action is about. Of two actions with the same key, only the later one counts."""


class UnknownActions(Exception):
    """Raised if a checkpoint or a commit has actions that a checkpoint of this module cannot contain."""


def later_rows(
    earlier: pa.Table | None,
    commits: Iterable[Sequence[Action]],
    now: float,
    is_needed: Callable[[Action], bool] = lambda _remove: True,
) -> pa.Table:
    """Return the rows of a checkpoint of the last of the commits; the table has the schema SCHEMA.

    earlier: the rows of a checkpoint; None if the first commit created the table. commits: the actions of all commits
    after this checkpoint, in their order. now: seconds since 1970; `remove` actions that are older than the retention
    of the table are left out. is_needed: whether to keep a `remove` action of these commits. Raises UnknownActions.
    """
    latest: dict[_Key, tuple[str, Action]] = {}
    for actions in commits:
        for action in actions:
            for kind, found in action.items():
                if (key := _key(kind, found)) is not None:
                    latest.pop(key, None)  # so that the later action also has the later place
                    latest[key] = kind, found
    kept = [(kind, found) for kind, found in latest.values() if kind != "remove" or is_needed(found)]
    rows = pa.Table.from_pylist([{kind: _row(kind, found)} for kind, found in kept], SCHEMA)
    if earlier is not None:
        rows = pa.concat_tables([_unchanged(earlier, latest), rows])
    retention = _retention(rows["metaData"].drop_null().to_pylist())
    if retention is None:
        return rows
    removed_at = pc.struct_field(rows["remove"], "deletionTimestamp")
    return rows.filter(pc.fill_null(pc.greater_equal(removed_at, int((now - retention) * 1000)), fill_value=True))


def _retention(metadata: Sequence[Action]) -> int | None:
    """Return the seconds for which `remove` actions are needed; None if the property of the table is not understood."""
    configuration = dict(metadata[-1]["configuration"]) if metadata else {}
    return interval_seconds(configuration.get(RETENTION, "interval 7 days"))


def encode_checkpoint(rows: pa.Table, version: int) -> tuple[bytes, bytes]:
    """Return the content of the checkpoint file of a version, and of the file `_last_checkpoint` that names it."""
    content = pa.BufferOutputStream()
    pq.write_table(rows, content, store_schema=False)
    return content.getvalue().to_pybytes(), json.dumps({"version": version, "size": rows.num_rows}).encode()


def interval_seconds(text: str) -> int | None:
    """Return the seconds of a table property such as `interval 7 days`; None for other forms of intervals."""
    match = _INTERVAL.match(text)
    return None if match is None else int(match[1]) * _UNITS[match[2].lower()]


def _key(kind: str, action: Action) -> _Key | None:
    """Return the key of an action; None for an action that checkpoints do not contain."""
    if kind in {"add", "remove"}:
        return ("file", action["path"], *_vector_id(action.get("deletionVector")))
    if kind in {"protocol", "metaData"}:
        return (kind,)
    if kind == "txn":
        return kind, action["appId"]
    if kind in {"commitInfo", "cdc"}:
        return None
    raise UnknownActions(f"_delta_log has actions of kind {kind!r}")


def _vector_id(vector: Action | None) -> tuple[str, ...]:
    """Return what distinguishes the deletion vectors of one file; empty without a vector."""
    if vector is None:
        return ()
    return vector["storageType"], vector["pathOrInlineDv"], str(vector.get("offset"))


def _row(kind: str, action: Action) -> Action:
    """Convert an action of a commit to its form in a checkpoint."""
    if unknown := [n for n, value in action.items() if value is not None and n not in _ALLOWED[kind]]:
        raise UnknownActions(f"an action of kind {kind!r} has the field {unknown[0]!r}")
    row: Action = {**_DEFAULTS[kind], **{name: value for name, value in action.items() if value is not None}}
    if kind == "metaData":
        row["format"] = row["format"] | {"options": [*row["format"].get("options", {}).items()]}
    return {name: [*value.items()] if name in _MAPS else value for name, value in row.items()}


def _unchanged(earlier: pa.Table, latest: Collection[_Key]) -> pa.Table:
    """Return the rows of an earlier checkpoint, without those whose key a later action has."""
    for name in earlier.column_names:
        if name not in _KINDS and earlier[name].null_count < len(earlier):
            raise UnknownActions(f"a checkpoint has actions of kind {name!r}")
    columns = [
        _known_fields(earlier[kind].combine_chunks(), kind)
        if kind in earlier.column_names
        else pa.nulls(len(earlier), columns)
        for kind, columns in _KINDS.items()
    ]
    replaced = {
        index for column, kind in zip(columns, _KINDS, strict=True) for index in _replaced(column, kind, latest)
    }
    kept = np.ones(len(earlier), bool)
    kept[[*replaced]] = False
    return pa.Table.from_arrays(columns, schema=SCHEMA).filter(pa.array(kept))


def _known_fields(column: pa.StructArray, kind: str) -> pa.StructArray:
    """Return a column of an earlier checkpoint with the type of SCHEMA; raises UnknownActions if it has more values."""
    for field in column.type:
        if field.name not in _ALLOWED[kind] and pc.struct_field(column, field.name).null_count < len(column):
            raise UnknownActions(f"an action of kind {kind!r} has the field {field.name!r}")
    if kind == "add" and _has_only_parsed_statistics(column):
        raise UnknownActions("a checkpoint has statistics only as parsed columns")
    try:
        return column.cast(_KINDS[kind])
    except pa.ArrowException as exc:
        raise UnknownActions(f"the actions of kind {kind!r} have other types in a checkpoint: {exc}") from exc


def _has_only_parsed_statistics(added: pa.StructArray) -> bool:
    names = [field.name for field in added.type]
    if "stats_parsed" not in names:
        return False
    parsed = pc.struct_field(added, "stats_parsed").is_valid()
    return bool(
        pc.any(parsed if "stats" not in names else pc.and_(parsed, pc.struct_field(added, "stats").is_null())).as_py()
    )


def _replaced(column: pa.StructArray, kind: str, latest: Collection[_Key]) -> list[int]:
    """Return the indexes of the actions of one kind whose key is in `latest`."""
    named = {"txn": "appId", "add": "path", "remove": "path"}.get(kind)
    candidates = column.is_valid()
    if named is not None:  # few actions have to become Python objects
        names = pa.array([key[1] for key in latest if len(key) > 1], pa.string())
        candidates = pc.is_in(pc.struct_field(column, named), names)
    indexes = np.flatnonzero(candidates.to_numpy(zero_copy_only=False)).tolist()
    return [index for index in indexes if _key(kind, column[index].as_py()) in latest]
