"""A staged search index: built beside the old one, and put in its place by the exchange of one small file.

A tantivy index is its `meta.json`: the list of the segments that count. The new segments are linked into the old
directory under their own unique names, then the new list replaces the old one by a rename. A reader sees the old index
or the new one, open readers keep what they opened, and the next commit of the sink removes the old segments.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from cdc import atomic_file
from cdc.config import DeadLetterSettings
from cdc.failpoint import hit
from cdc.stores.published import Published, TableRecord
from cdc.table import TableSchema
from pipelines.sinks.contract import NONE_PARKED
from pipelines.sinks.search.sink import SearchSink

META: Final = "meta.json"
"""What tantivy reads first: the segments that count."""
MANAGED: Final = ".managed.json"
"""Every file that tantivy may remove once no segment list names it."""
_LOCKS: Final = (".tantivy-writer.lock", ".tantivy-meta.lock")


class StagedSearch:
    """A new index of a search sink, until `put` or `discard`; for one process at a time.

    After a crash before `put` ends its rename, the old index is untouched; after it the new one is in place.
    """

    def __init__(
        self, name: str, path: str | Path, fields: Sequence[str] = (), dead_letters: DeadLetterSettings = NONE_PARKED
    ) -> None:
        self._path = Path(path)
        self.erased: dict[str, int] = {}
        """Nothing: of the old index nothing stays."""
        self._staged = self._path.with_name(f"{self._path.name}.replay")
        self.sink = SearchSink(f"{name} (replay)", self._staged, fields, dead_letters)
        self._held = SearchSink(name, path, fields)
        self._log_id = ""

    def forget_earlier(self, schemas: Mapping[int, TableSchema]) -> None:  # noqa: ARG002 - an index is one for all
        """Remove what an earlier process staged and did not put in place."""
        shutil.rmtree(self._staged, ignore_errors=True)

    def open_published(self, log_id: str) -> Published | None:
        """Where the sink stands; holds the index's writer from here on, so that no driver can have it."""
        self._log_id = log_id
        return self._held.open(log_id)

    def put(self, built: Published, rest: Mapping[int, TableRecord]) -> Published:
        """Put the new index in place; nothing of the old one stays. `rest`: tables that could not be built.

        Called once, after `open_published`.
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
        shutil.rmtree(self._staged, ignore_errors=True)
        return published

    def discard(self) -> None:
        """Give both writers back; files that were not put in place go with the next replay."""
        self.sink.close()
        self._held.close()


def put_index(new: Path, old: Path) -> None:
    """Make the index in `old` that of `new`, which is on the same file system and has no writer."""
    managed: set[str] = set()
    for directory in (old, new):
        with suppress(FileNotFoundError):
            managed |= set(json.loads((directory / MANAGED).read_bytes()))
    for file in new.iterdir():
        if file.name not in {META, MANAGED, *_LOCKS} and not (old / file.name).exists():
            os.link(file, old / file.name)
    # first what may be removed, then what counts: killed in between, the next commit removes the new segments
    atomic_file.replace(old / MANAGED, json.dumps(sorted(managed)).encode())
    hit("replay_before_publish")
    atomic_file.replace(old / META, (new / META).read_bytes())
