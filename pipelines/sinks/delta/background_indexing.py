"""Background indexing: reads the keys of many data files in a thread, for a key index, while merges continue.

A driver that starts on another machine has no key index. To read the keys of a large target takes minutes, and small
batches do not wait for it: until a file is in the index, a merge searches the keys in the file itself (file_search.py).
This is exact, because a data file never changes, and only live files and rows that are not deleted count.

A thread per sink works on groups of files of about GROUP_ROWS rows, one after the other. The next merge adds the
finished groups to the index. From then on it searches fewer files, and with the last group none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa
import structlog

from cdc.failpoint import hit
from cdc.thread_priority import lower_thread_priority
from pipelines.sinks.delta.indexed.delta_log import LiveFile
from pipelines.sinks.delta.indexed.key_index import KeyHashes, KeyIndex, PreparedRun

AT_ONCE: Final = 1_000_000
"""Number of rows in new data files up to which a merge adds them to the index itself, in about half a second."""
GROUP_ROWS: Final = 2_000_000
"""Number of rows at which a group of files is complete; the hashes of a row need 32 bytes of memory."""
ROW_BYTES: Final = 16
"""Estimated least bytes of a row in a data file without statistics."""
NICE_INCREMENT: Final = 10
"""Amount by which the nice value of the thread is increased, because merges need the same cores."""

ReadKeys = Callable[[LiveFile], tuple[KeyHashes, np.ndarray]]
"""Function that returns the hashes of the keys in a data file, and the row number of each."""

log = structlog.get_logger("apply")


class IndexingThread:
    """The thread that reads the keys of files for all indexes of one sink, so that one group is in memory at a time."""

    def __init__(
        self, at_once: int = AT_ONCE, group_rows: int = GROUP_ROWS, begin: Callable[[], object] = lambda: None
    ) -> None:
        """at_once: see AT_ONCE. group_rows: see GROUP_ROWS. begin: function that the thread calls before each group; it
        may wait.
        """
        self.at_once, self.group_rows, self._begin = at_once, group_rows, begin
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], PreparedRun | None]) -> Future[PreparedRun | None]:
        """Let the thread prepare a run, after the runs of earlier calls."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "key-reader", lower_thread_priority, (NICE_INCREMENT,))

        def prepare() -> PreparedRun | None:
            self._begin()
            return work()

        return self._pool.submit(prepare)

    def close(self) -> None:
        """End the thread, after all indexes were closed."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None


@dataclass(frozen=True, slots=True)
class _Group:
    """Files whose keys the thread reads together."""

    numbers: Mapping[str, int]
    """Path of each file → its number in the index."""
    result: Future[PreparedRun | None]
    """None if no file of the group was live any more."""


class BackgroundIndexing:
    """The data files of one table that are not in its key index yet. One thread uses it, the thread that merges."""

    def __init__(self, index: KeyIndex, thread: IndexingThread, read_keys: ReadKeys) -> None:
        self._index, self._thread, self._read_keys = index, thread, read_keys
        self.files: dict[str, tuple[int, LiveFile]] = {}
        """Path of a file that waits for the thread → its number in the index, and the file."""
        self._groups: list[_Group] = []

    def takes(self, files: Mapping[str, LiveFile]) -> bool:
        """Return whether the files have too many rows for a merge to add them to the index itself."""
        return sum(map(_row_count, files.values())) > self._thread.at_once

    def start(self, files: Mapping[str, LiveFile]) -> None:
        """Let the thread read the keys of files."""
        for group in _groups(files, self._thread.group_rows):
            numbered = {path: (self._index.new_number(), file) for path, file in group.items()}
            self.files |= numbered
            numbers = {path: number for path, (number, _) in numbered.items()}
            self._groups.append(_Group(numbers, self._thread.submit(partial(self._prepare, numbered))))

    def forget(self, path: str) -> None:
        """Leave out a file that is no longer live."""
        self.files.pop(path, None)

    def add_finished(self) -> None:
        """Add the files of the groups that are finished to the index."""
        while self._groups and self._groups[0].result.done():
            self._add(self._groups.pop(0))

    @property
    def waiting_files(self) -> int:
        """Number of files whose keys the thread has not read yet. Any thread may ask."""
        return sum(len(group.numbers) for group in [*self._groups] if not group.result.done())

    def close(self) -> None:
        """Add what the thread has read to the index; do not wait for other groups than the one that it works on."""
        for group in self._groups:
            group.result.cancel()
        while self._groups:
            self._add(self._groups.pop(0))
        self.files.clear()

    def _add(self, group: _Group) -> None:
        """Add the live files of a group to the index. A group that failed is left out: its files are unknown again."""
        numbers = {path: number for path, number in group.numbers.items() if self._waits(path, number)}
        for path in numbers:
            self.forget(path)
        try:
            run = group.result.result()
        except CancelledError:
            return
        except (OSError, pa.ArrowException) as exc:
            # a file may have left the table meanwhile; a merge that reads a damaged file itself raises its error
            log.warning("the keys of data files could not be read in the background", reason=str(exc))
            return
        if run is None:
            return
        self._index.add_prepared(numbers, run)
        self._index.save()
        hit("delta_index_group_added")

    def _waits(self, path: str, number: int) -> bool:
        """Return whether a file is still live, so that its keys belong into the index. The thread asks, too."""
        return self.files.get(path, (-1,))[0] == number

    def _prepare(self, files: Mapping[str, tuple[int, LiveFile]]) -> PreparedRun | None:
        # copy-on-write may have replaced files of the group before its turn
        live = {number: file for path, (number, file) in files.items() if self._waits(path, number)}
        if not live:
            return None
        run = self._index.prepare({number: self._read_keys(file) for number, file in live.items()})
        hit("delta_index_group_prepared")
        return run


def _groups(files: Mapping[str, LiveFile], group_rows: int) -> Iterator[dict[str, LiveFile]]:
    """Divide files into groups of at least `group_rows` rows; the last one may have less."""
    group, rows = dict[str, LiveFile](), 0
    for path, file in files.items():
        group[path] = file
        rows += _row_count(file)
        if rows >= group_rows:
            yield group
            group, rows = {}, 0
    if group:
        yield group


def _row_count(file: LiveFile) -> int:
    """Return the number of rows of a file, including deleted ones; an estimate if its statistics do not contain it."""
    return int(file.add["size"]) // ROW_BYTES if file.rows is None else file.rows
