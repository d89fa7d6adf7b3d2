"""Actions of Delta commits as JSON objects, and the content of a commit file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
Action = dict[str, Any]
"""An action of `_delta_log` as a JSON object with one key, its kind; or only the value of that key."""


def add_action(
    path: str,
    size: int,
    statistics: str,
    partition_values: Mapping[str, str | None] | None = None,
    *,
    data_change: bool = True,
) -> Action:
    """Return the `add` action of a data file written now, without the outer key.

    statistics: as JSON. data_change: False if the same commit removes the files that contained these rows.
    """
    return {
        "path": path,
        "partitionValues": dict(partition_values or {}),
        "size": size,
        "modificationTime": _now(),
        "dataChange": data_change,
        "stats": statistics,
    }


def remove_action(
    path: str, size: int, partition_values: Mapping[str, str | None] | None = None, *, data_change: bool = True
) -> Action:
    """Return the `remove` action of a data file, without the outer key; the file stays in the storage.

    data_change: False if the same commit adds files that contain the rows of this file.
    """
    return {
        "path": path,
        "deletionTimestamp": _now(),
        "dataChange": data_change,
        "extendedFileMetadata": True,
        "partitionValues": dict(partition_values or {}),
        "size": size,
    }


def txn_action(app_id: str, version: int) -> Action:
    """Return the `txn` action that sets the version of an application id, with its outer key."""
    return {"txn": {"appId": app_id, "version": int(version), "lastUpdated": _now()}}


def commit_info(operation: str, **more: Any) -> Action:
    """Return the `commitInfo` action of a commit made now, with its outer key. more: further fields."""
    info = {"timestamp": _now(), "operation": operation, "operationParameters": {}}
    return {"commitInfo": info | more}


def encode_commit(actions: Iterable[Action]) -> bytes:
    """Return the content of a commit file: one JSON object in each line."""
    return "".join(_ENCODER.encode(action) + "\n" for action in actions).encode()


def decode_commit(content: bytes) -> list[Action]:
    """Return the actions in the content of a commit file; raises ValueError if a line is not a JSON object."""
    actions = [json.loads(line) for line in content.splitlines() if line.strip()]
    if not all(isinstance(action, dict) for action in actions):
        raise ValueError("a line of the commit file is not a JSON object")
    return actions


def _now() -> int:
    return int(time.time() * 1000)
