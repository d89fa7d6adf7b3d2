"""Path ownership: checks that the path of a target is empty or contains a Delta table written from this log."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyarrow.fs as pafs
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler

from cdc.config.delta_sink import DeltaSinkDefinition
from cdc.errors import SinkUnavailable, TargetUnusable
from cdc.targets.lake_reader import Lake
from cdc.targets.unsupported_table_features import features_in_error

LOG_ID: Final = "cdc.log_id"
"""Table property of a target that contains the id of the log from which the target is written."""
STAGED: Final = "replay-"
"""Prefix of the directories in which a replay builds new targets and their published record."""
ELSEWHERE: Final = (
    "set another path in the sink or in a rule for the table, or move the files at this path to another directory"
)
_HIDDEN: Final = ("_", ".")


def check_path(uri: str, log_id: str | None) -> None:
    """Raise TargetUnusable if a sink of this log may not write to the path.

    `log_id` is the id of this log, or None if no log exists yet. Raises SinkUnavailable if the store cannot be read.
    """
    if "://" not in uri and Path(uri).is_file():
        raise TargetUnusable(f"the target's path {uri!r} is a file: expected a directory", remedy=ELSEWHERE)
    try:
        if not DeltaTable.is_deltatable(uri):
            check_free(uri)
            return
        owner = DeltaTable(uri).metadata().configuration.get(LOG_ID)
    except (DeltaError, OSError) as exc:
        if (features := features_in_error(str(exc))) is None:
            raise SinkUnavailable(
                f"the target's path {uri!r} cannot be listed: {type(exc).__name__}",
                remedy="check that the store of the sink's path is running and permits listing and reading",
            ) from exc
        raise TargetUnusable(
            f"the Delta table at {uri!r} has table features that delta-rs does not read: {features}"
        ) from exc
    check_owner(uri, owner, log_id)


def check_free(uri: str) -> None:
    """Raise TargetUnusable if the directory is not empty; hidden files and directories of a replay are ignored."""
    try:
        store = pafs.PyFileSystem(DeltaStorageHandler(uri))
    except TableNotFoundError:  # no such directory
        return
    names = sorted(found.base_name for found in store.get_file_info(pafs.FileSelector("", allow_not_found=True)))
    if foreign := [name for name in names if not name.startswith((*_HIDDEN, STAGED))]:
        raise TargetUnusable(
            f"the target's path {uri!r} is neither a Delta table nor empty: it contains {foreign[0]!r}",
            remedy=ELSEWHERE,
        )


def check_owner(uri: str, owner: str | None, log_id: str | None) -> None:
    """Raise TargetUnusable if the Delta table at `uri` was not written from this log.

    `owner` is the id of the log in the table's properties, or None if cdc did not create the table. `log_id` is the id
    of this log, or None if no log exists yet.
    """
    if owner is None:
        raise foreign_table_error(uri, LOG_ID)
    if owner != log_id:
        expected = "this pipeline has no log yet" if log_id is None else f"expected {log_id!r}"
        raise TargetUnusable(f"the Delta table at {uri!r} was written from log {owner!r}: {expected}", remedy=ELSEWHERE)


def foreign_table_error(uri: str, name: str) -> TargetUnusable:
    """Return the error for a Delta table that cdc did not create; `name` is the table property that is missing."""
    return TargetUnusable(
        f"the Delta table at {uri!r} was not created by cdc: it has no property {name!r}", remedy=ELSEWHERE
    )


def is_begun(sink: DeltaSinkDefinition) -> bool:
    """Return True if the sink has published a cut. Also return True if the store cannot be read."""
    try:
        return Lake.of(sink).published() is not None
    except (DeltaError, OSError):
        return True
