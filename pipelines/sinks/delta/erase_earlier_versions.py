"""Erasure of a target's earlier versions, after a replay under rules that hide more values.

Earlier versions still contain the hidden values. The replay marks the target, replaces the rows, and then erases the
earlier versions. After a crash, the next replay or the driver that opens the sink finds the mark and erases them. The
mark is removed last. Only the data files of the current version remain. Earlier commits are removed too, because they
contain the least and greatest value of each column in each file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow.fs as pafs
import structlog
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler

from cdc.delta_protocol.checkpoint_rows import RETENTION
from cdc.failpoint import hit
from pipelines.sinks.delta.delta_log_cleanup import (
    LOG,
    expired_log_files,
    paths_of,
    remove_old_commits,
    write_checkpoint,
)
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.table_properties import set_properties

ERASE: Final = "cdc.erase"
"""Table property that marks a target whose earlier versions have to be erased.

Its value is the retention of removed files that the target had before the mark. Until the erasure, the target has a
retention of zero, so that no checkpoint lists removed files: their paths contain values of partition columns.
"""
_NONE: Final = "interval 0 seconds"
_DEFAULT: Final = "interval 7 days"
"""Delta's default retention of removed files."""


log = structlog.get_logger("apply")


def is_marked(table: DeltaTable) -> bool:
    """Return whether earlier versions of the table are to be erased, because `mark_to_erase` marked the table."""
    return bool(table.metadata().configuration.get(ERASE))


def mark_to_erase(target: DeltaTarget) -> None:
    """Mark a target whose earlier versions must be erased. After a crash, the next replay or driver finds the mark."""
    if not is_marked(target.table):
        before = target.read_property(RETENTION) or _DEFAULT
        target.set_properties({ERASE: before, RETENTION: _NONE})


def erase_earlier(uri: str, version: int) -> int:
    """Remove the files that `version` and later versions do not need, and return the number of removed data files.

    Last, the mark set by `mark_to_erase` is removed. Only the single writer of the table may call this function,
    because it also removes files that no commit names yet.
    """
    table = DeltaTable(uri)
    needed = paths_of(table) | paths_of(DeltaTable(uri, version=version))
    store = pafs.PyFileSystem(DeltaStorageHandler(uri))
    gone = [path for path in _parquet_files(store) if path not in needed]
    for path in gone:
        store.delete_file(path)
        hit("delta_erased_file")
    _remove_log(uri, store, version)
    if before := table.metadata().configuration.get(ERASE):
        set_properties(uri, table, {ERASE: "", RETENTION: str(before)})
    log.info("deleted files because they contained values that the rules now hide", target=uri, files=len(gone))
    return len(gone)


def _remove_log(uri: str, store: pafs.FileSystem, version: int) -> None:
    write_checkpoint(uri, version)
    if "://" in uri:
        names = [info.path for info in store.get_file_info(pafs.FileSelector(LOG, allow_not_found=True))]
        for path in expired_log_files(names, version):
            store.delete_file(path)
        return
    remove_old_commits(uri, version, kept=0)
    for draft in (Path(uri) / LOG).glob(".*.tmp"):  # of a killed process: it may have the bounds of hidden columns
        draft.unlink(missing_ok=True)
    for folder in sorted((path for path in Path(uri).rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()  # its name may contain a value of a partition column


def _parquet_files(store: pafs.FileSystem, folder: str = "") -> Iterator[str]:
    """Yield the path of every Parquet file in the directory of the table, except those of tables inside of it."""
    infos = store.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    if folder and f"{folder}/{LOG}" in [info.path for info in infos]:
        return
    for info in infos:
        if info.type == pafs.FileType.Directory and info.base_name != LOG:
            yield from _parquet_files(store, info.path)
        elif info.path.endswith(".parquet"):
            yield info.path
