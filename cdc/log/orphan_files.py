"""Leftovers: data files that a writer staged for a commit and did not live to make."""

from __future__ import annotations

from contextlib import suppress

from cdc.log import removed_files
from cdc.log.fenced_table import FencedTable
from cdc.log.layout import CHANGES, CommitInfo
from cdc.log.object_path import Root, as_root


def remove_staged_files(root: str | Root) -> int:
    """Remove them from the log under root; how many bytes that gave back. For the one writer, before it opens the log.

    Who staged them may live, and be about to commit them: a commit that changes nothing comes first, and refuses that.
    What the log has taken and let go again is written down (cdc.log.removed_files), and stays for who still reads it.
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
        with suppress(FileNotFoundError):  # what was trimmed may be swept beside this
            size = file.stat().st_size
            file.unlink()
            given += size
    return given
