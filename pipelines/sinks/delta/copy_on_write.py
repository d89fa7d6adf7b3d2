"""Copy-on-write: writes data files again without the rows that a merge replaces or deletes.

A target without deletion vectors can lose a row only with its file. So every data file with such a row is replaced by a
new file with the other rows, in their order. Rows that a deletion vector of another client deletes are left out, too.

Rows pass through in batches of a row group at most, into a file that is written as a stream. So the memory does not
depend on the size of the files. Small files of a partition are written together into one file: otherwise the number of
small files, and with it the cost of a merge into all of them, would grow with each batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cdc.delta_protocol.table_storage import TableStorage
from cdc.failpoint import hit
from pipelines.sinks.delta import file_compaction
from pipelines.sinks.delta.file_compaction import small_by_partition, together
from pipelines.sinks.delta.indexed.delta_log import LiveFile

SMALL: Final = 16 << 20
"""Size in bytes below which data files are written together. A larger file is written again alone."""

_Group = tuple[tuple[str, bytes], ...]
"""Path of each data file that is written into one new file, with the set of its rows that are left out."""


@dataclass(slots=True)
class FileRewriter:
    """Writes the data files of one merge again. A second attempt of the merge gets the files of the first one, unless
    their rows have changed.
    """

    storage: TableStorage
    columns: Sequence[str]
    """The columns of the table; others are left out."""
    described: Sequence[str]
    """The columns that get file statistics."""
    _written: dict[_Group, LiveFile] = field(default_factory=dict)

    def write(self, files: Sequence[LiveFile]) -> list[LiveFile]:
        """Return new data files with the live rows of `files`, which no commit has added yet.

        files: data files with at least one live row. Their `deleted` also has the rows that the merge removes.
        """
        return [self._new_file(group) for group in _groups(files)]

    def _new_file(self, sources: Sequence[LiveFile]) -> LiveFile:
        group = tuple((file.path, file.deleted.serialize()) for file in sources)
        if group not in self._written:
            rewritten = file_compaction.write(self.storage, sources, self.columns, self.described, _at_once)
            self._written[group] = LiveFile(rewritten.file.add | {"dataChange": True})
            hit("delta_indexed_file_copied")
        return self._written[group]


def _groups(files: Sequence[LiveFile]) -> Iterator[Sequence[LiveFile]]:
    """Divide data files into groups that are written into one file each."""
    yield from ([file] for file in files if file.add["size"] >= SMALL)
    for small in small_by_partition(files, SMALL):
        remaining = small
        while remaining:
            group = together(remaining)
            yield group
            remaining = remaining[len(group) :]


def _at_once(_copied: int) -> None:
    """Do not limit the bytes per second that a merge copies."""
