"""A definition over a log of ten segments, of which some are compacted and trimmed: ground for tests of commands."""

from __future__ import annotations

import shutil
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from cdc.log import consumers
from cdc.log.consumers import Consumer
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.log.rows import IDENTITY, info, row, schema_of, table
from tests.log.simple_compaction import compact
from tests.pipelines.cold_log import EACH_OF_ITS_OWN

HOUR_US = 3_600_000_000


class Folder:
    """The definition in a folder; positions are 100 to 200 in tens, two rows of the keys 0 and 1 at each."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.path, self.root = folder / "pipeline.yaml", folder / "log"
        self.path.write_text(
            f"name: shop\nsource: {{dsn: 'postgresql://localhost/shop'}}\ntables: [{{match: 'shop.*'}}]\n"
            f"log: {{path: '{self.root}', retain: {{grace: 0}}}}\n"
            f"sinks: [{{type: delta, name: lake, path: '{folder}/lake/{{schema}}/{{table}}'}}]\n"
        )
        shutil.copytree(Path(_prepared().name, "log"), self.root)
        self.writer = LogWriter.open(self.root, IDENTITY, EACH_OF_ITS_OWN)

    @classmethod
    def half(cls, folder: Path) -> Self:
        """With a part of it compacted, and a part of that trimmed."""
        made = cls(folder)
        made.compacted()
        made.trimmed()
        return made

    def compacted(self, upto: int = 170, *, floor: int = 0) -> None:
        """Move the horizon."""
        compact(self.root, upto, merge=bool(floor), floor=floor)

    def trimmed(self, upto: int = 150) -> None:
        """Take the segments up to a position out: as many as there are positions, one to a segment."""
        self.writer.trim(range((upto - 100) // 10 + 1), Position(upto))

    def consumer(self, name: str, position: int, uuid: str = "", age: int = 0) -> None:
        """Register a consumer that was heard of so many hours ago."""
        seen = time.time_ns() // 1_000 - age * HOUR_US
        consumers.register(self.root, Consumer(uuid or name, name, Position(position), None, seen))

    def append(self, last: int, **fields: Any) -> None:
        """One more row, in a segment of its own."""
        self._append(last, row(last, **fields))

    def _append(self, last: int, *rows: dict[str, object]) -> None:
        _append(self.writer, last, *rows)


@cache
def _prepared() -> TemporaryDirectory[str]:
    """The log that every one begins with, in a folder: to write it takes longer than to copy it."""
    folder = TemporaryDirectory()
    writer = LogWriter.open(Path(folder.name, "log"), IDENTITY, EACH_OF_ITS_OWN)
    _append(writer, 100, row(100, op="s", key=None, after=None, payload=schema_of(16384, "name").to_json()))
    for position in range(110, 210, 10):
        _append(writer, position, row(position, 0), row(position, 1))
    return folder


def _append(writer: LogWriter, last: int, *rows: dict[str, object]) -> None:
    writer.commit(writer.stage(table(*rows)), info(last))
