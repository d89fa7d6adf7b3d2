"""Read-only check of a target's path: whether it is free, or contains a Delta table of this log."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyarrow.fs as pafs
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler

from cdc.errors import SinkUnavailable, TargetUnusable
from cdc.stores.lake import Lake
from cdc.stores.table_features import named_in

LOG_ID: Final = "cdc.log_id"
"""The property that makes a Delta table ours: the log that it is filled from."""
STAGED: Final = "replay-"
"""Of the folder of a staged table inside the table it replaces, and of its record beside the sink's."""
ELSEWHERE: Final = (
    "set another path in the sink or in a rule for the table, or move what is at this path to another directory"
)
_HIDDEN: Final = ("_", ".")


def check_place(uri: str, log_id: str | None) -> None:
    """Raise TargetUnusable for what a sink of this log would leave alone there; None: there is no log that fills any.

    Raises SinkUnavailable where the store does not say what lies there.
    """
    if "://" not in uri and Path(uri).is_file():
        raise TargetUnusable(f"{uri!r} is a file: expected a directory", remedy=ELSEWHERE)
    try:
        if not DeltaTable.is_deltatable(uri):
            check_free(uri)
            return
        owner = DeltaTable(uri).metadata().configuration.get(LOG_ID)
    except (DeltaError, OSError) as exc:
        if (features := named_in(str(exc))) is None:
            raise SinkUnavailable(
                f"{uri!r} cannot be listed: {type(exc).__name__}",
                remedy="check that the store of the sink's path is running and permits listing and reading",
            ) from exc
        told = f"the Delta table at {uri!r} has table features that delta-rs does not read: {features}"
        raise TargetUnusable(told) from exc
    check_owner(uri, owner, log_id)


def check_free(uri: str) -> None:
    """Raise TargetUnusable where files lie that no Delta table has; a replay's folder and hidden ones are none."""
    try:
        store = pafs.PyFileSystem(DeltaStorageHandler(uri))
    except TableNotFoundError:  # no such directory
        return
    lying = sorted(found.base_name for found in store.get_file_info(pafs.FileSelector("", allow_not_found=True)))
    if theirs := [name for name in lying if not name.startswith((*_HIDDEN, STAGED))]:
        raise TargetUnusable(f"{uri!r} is neither a Delta table nor empty: it contains {theirs[0]!r}", remedy=ELSEWHERE)


def check_owner(uri: str, owner: str | None, log_id: str | None) -> None:
    """Raise TargetUnusable for a Delta table whose property says another log, or none; log_id: as of check_place."""
    if owner is None:
        raise foreign_table_error(uri, LOG_ID)
    if owner != log_id:
        expected = "this pipeline has no log yet" if log_id is None else f"expected {log_id!r}"
        raise TargetUnusable(f"the Delta table at {uri!r} was written from log {owner!r}: {expected}", remedy=ELSEWHERE)


def foreign_table_error(uri: str, name: str) -> TargetUnusable:
    """The error of a Delta table that lacks a property of ours."""
    return TargetUnusable(
        f"the Delta table at {uri!r} was not created by cdc: it has no property {name!r}", remedy=ELSEWHERE
    )


def is_begun(template: str) -> bool:
    """Whether the sink with this path has published anything, or a store that does not answer may have it."""
    try:
        return Lake.open(template).published() is not None
    except (DeltaError, OSError):
        return True
