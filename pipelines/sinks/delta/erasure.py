"""Erasure: permanent removal of earlier versions of a target whose rules now hide values that they contain.

A replay under rules that hide more marks the target before it replaces the rows. After a crash the mark tells the next
replay, or the sink that opens the target, to erase. The mark is removed last. One version remains: its files, and its
log from there on. Earlier commits are removed too, because they contain the least and greatest values of each file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow.fs as pafs
import structlog
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler

from cdc import atomic_file
from cdc.failpoint import hit
from cdc.log.checkpoint import HINT, checkpoint_at
from pipelines.sinks.delta.commit_log import remove_old_commits
from pipelines.sinks.delta.maintenance import expired_log_files, paths_of

ERASE: Final = "cdc.erase"
"""Property that marks a target whose earlier versions are to be erased.

Its value is the target's earlier retention of removed files. Meanwhile the retention is zero, so that no checkpoint
lists removed files: their paths contain values of partition columns.
"""
_RETENTION: Final = "delta.deletedFileRetentionDuration"
_NONE: Final = "interval 0 seconds"
_DEFAULT: Final = "interval 7 days"
"""The default of Delta."""

_LOG: Final = "_delta_log"

log = structlog.get_logger("apply")


def is_marked(table: DeltaTable) -> bool:
    """Whether earlier versions of the table are to be erased."""
    return bool(table.metadata().configuration.get(ERASE))


def mark_to_erase(table: DeltaTable) -> None:
    """Mark the table, so that its earlier versions are erased."""
    if not is_marked(table):
        before = str(table.metadata().configuration.get(_RETENTION) or _DEFAULT)
        table.alter.set_table_properties({ERASE: before, _RETENTION: _NONE}, raise_if_not_exists=False)


def erase_earlier(uri: str, version: int) -> int:
    """Remove the files that no version from that one on needs, and the mark; the number of removed data files.

    Only for the one writer of the table: a file that another writer is about to commit would be removed too.
    """
    table = DeltaTable(uri)
    needed = paths_of(table) | paths_of(DeltaTable(uri, version=version))
    store = pafs.PyFileSystem(DeltaStorageHandler(uri))
    gone = [path for path in _data_files(store) if path not in needed]
    for path in gone:
        store.delete_file(path)
        hit("delta_erased_file")
    _remove_log(uri, store, version)
    if before := table.metadata().configuration.get(ERASE):
        table.alter.set_table_properties({ERASE: "", _RETENTION: str(before)}, raise_if_not_exists=False)
    log.info("removed rows that the rules now hide", target=uri, files=len(gone))
    return len(gone)


def _remove_log(uri: str, store: pafs.FileSystem, version: int) -> None:
    if "://" in uri:
        DeltaTable(uri, version=version).create_checkpoint()
        names = [info.path for info in store.get_file_info(pafs.FileSelector(_LOG, allow_not_found=True))]
        for path in expired_log_files(names, version):
            store.delete_file(path)
        return
    atomic_file.replace(Path(uri) / _LOG / HINT, checkpoint_at(Path(uri), version))
    remove_old_commits(uri, version, kept=0)
    for folder in sorted((path for path in Path(uri).rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()  # its name may contain a value of a partition column


def _data_files(store: pafs.FileSystem, folder: str = "") -> Iterator[str]:
    """Every Parquet file of the table, also of its change data feed; not those of another table below it."""
    infos = store.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    if folder and f"{folder}/{_LOG}" in [info.path for info in infos]:
        return
    for info in infos:
        if info.type == pafs.FileType.Directory and info.base_name != _LOG:
            yield from _data_files(store, info.path)
        elif info.path.endswith(".parquet"):
            yield info.path
