"""Staged index: a new search index that a replay builds. By renaming one file, the new index replaces the old one.

The file `meta.json` of a tantivy index lists its live segments. First, the files of the new segments are linked into
the old directory under their own unique names. Then a rename replaces the old `meta.json` by the new one. A reader sees
either the old index or the new one. A reader that is already open continues with the old segments, whose files are
deleted after the rename: they may contain values that the rules of the sink now hide.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import tantivy

from cdc import atomic_file
from cdc.config import DeadLetterSettings
from cdc.failpoint import hit
from cdc.table import TableSchema
from cdc.targets.published_record import Published, TableRecord
from pipelines.sinks.contract import NONE_PARKED
from pipelines.sinks.search.document_shape import DocumentShapes
from pipelines.sinks.search.sink import WRITER_BYTES, SearchSink

META: Final = "meta.json"
"""Name of the file that lists the live segments; tantivy reads this file first."""
MANAGED: Final = ".managed.json"
"""Name of the file that lists all files of the index; tantivy removes a file once META no longer lists its segment."""
_LOCKS: Final = (".tantivy-writer.lock", ".tantivy-meta.lock")


class StagedSearch:
    """The new index that a replay fills through the attribute `sink`; `put` replaces the old index by it.

    Only one process may use an instance. `put` replaces the index by one rename. After a crash before this rename the
    old index is unchanged; after the rename the new index is in place.
    """

    def __init__(
        self,
        name: str,
        path: str | Path,
        shapes: DocumentShapes | None = None,
        dead_letters: DeadLetterSettings = NONE_PARKED,
    ) -> None:
        self._path = Path(path)
        self.erased: dict[str, int] = {}
        """See StagedTarget.erased. Always empty, because `put` replaces every file of the old index anyway."""
        self._staged = self._path.with_name(f"{self._path.name}.replay")
        self.sink = SearchSink(f"{name} (replay)", self._staged, shapes, dead_letters)
        self._old = SearchSink(name, path, shapes)
        self._log_id = ""

    def forget_earlier(self, schemas: Mapping[int, TableSchema]) -> None:  # noqa: ARG002 - an index is one for all
        """Remove the index that an earlier replay built and did not put in place."""
        shutil.rmtree(self._staged, ignore_errors=True)

    def open_published(self, log_id: str) -> Published | None:
        """Return the published record of the old index; None if nothing was published.

        This process then has the writer of the old index, so no driver can open that index.
        """
        self._log_id = log_id
        return self._old.open(log_id)

    def put(self, built: Published, rest: Mapping[int, TableRecord]) -> Published:
        """Replace the old index by the new one, and return the published record.

        built: the record of the new index. rest: the records of the tables that the replay did not build. Call this
        method once, after `open_published`.
        """
        own = {relation: replace(record, target=str(self._path)) for relation, record in built.tables.items()}
        published = replace(built, tables={**rest, **own})
        self.sink.open(self._log_id)
        self.sink.publish(published)
        self.sink.close()
        hit("replay_before_table")
        put_index(self._staged, self._path)
        hit("replay_after_table")
        self.discard()
        remove_unused_files(self._path)
        shutil.rmtree(self._staged, ignore_errors=True)
        return published

    def discard(self) -> None:
        """Close the writers of both indexes. If `put` was not called, the next replay removes the files of the new
        index.
        """
        self.sink.close()
        self._old.close()


def remove_unused_files(path: Path) -> None:
    """Delete the files of the index in directory `path` that its META does not list, such as those of an old index.

    Does nothing if a process has the writer of the index, because a sink deletes such files when it opens the index.
    """
    with suppress(ValueError):
        tantivy.Index.open(str(path)).writer(heap_size=WRITER_BYTES, num_threads=1).garbage_collect_files()


def put_index(new: Path, old: Path) -> None:
    """Replace the index in directory `old` by the index in directory `new`.

    Both directories are on the same file system. The new index has no open writer.
    """
    managed: set[str] = set()
    for directory in (old, new):
        with suppress(FileNotFoundError):
            managed |= set(json.loads((directory / MANAGED).read_bytes()))
    for file in new.iterdir():
        if file.name not in {META, MANAGED, *_LOCKS} and not (old / file.name).exists():
            atomic_file.link(file, old / file.name)
    # MANAGED before META: after a crash in between, the next commit of the sink removes the new segments
    atomic_file.replace(old / MANAGED, json.dumps(sorted(managed)).encode())
    hit("replay_before_publish")
    atomic_file.replace(old / META, (new / META).read_bytes())
