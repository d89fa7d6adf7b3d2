"""Removal of data files that a killed writer staged but never committed."""

from __future__ import annotations

from contextlib import suppress

from cdc.log import removed_files
from cdc.log.fenced_table import FencedTable
from cdc.log.layout import CHANGES, CommitInfo
from cdc.log.object_path import Root, as_root


def remove_staged_files(root: str | Root) -> int:
    """Remove staged, uncommitted files and return the freed bytes; only for the writer, before it opens the log.

    The process that staged them may still be alive. An empty commit comes first, so that its later commit is fenced.
    Files that a commit removed from the log are recorded in cdc.log.removed_files and stay for their readers.
    """
    changes = as_root(root) / CHANGES
    found: list[Root] = list(changes.glob("segment=*/*.parquet"))
    fenced = FencedTable(changes)
    known = {*fenced.files()["path"].to_pylist()}
    known |= {
        path for note in removed_files.list_removals(root).values() if note.table == CHANGES for path in note.paths
    }
    left = [file for file in found if f"{file.parent.name}/{file.name}" not in known]
    last = CommitInfo.from_metadata(fenced.said_last())
    if not left or last is None:
        return 0
    fenced.commit([], int(last.last), last.to_metadata())
    given = 0
    for file in left:
        with suppress(FileNotFoundError):  # a vacuum may remove trimmed files concurrently
            size = file.stat().st_size
            file.unlink()
            given += size
    return given
