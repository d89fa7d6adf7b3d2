"""A driver of one table of a sink: it applies, publishes, and finds its parked rows again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from cdc.config import DeadLetterSettings, TableSettings
from cdc.targets.lake_reader import read_target
from cdc.targets.search_index_reader import SearchIndex
from pipelines.dead_letters.quarantine import Quarantine
from pipelines.sinks.contract import ParkingSink, Published, TableBatch, TableRecord
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.search.sink import SearchSink
from tests.contracts.folded import ORDERS, batch

LOG = "log-1"
NAN = "NaN"
"""What a numeric(10,2) of Postgres holds and a decimal of the target does not."""


class Driver:
    """One life of the apply process, as far as one table of one sink goes."""

    def __init__(self, folder: Path, stop_at: int = 10, ratio: float = 1, **said: Any) -> None:
        self.sink = self.made(folder, DeadLetterSettings(stop_at=stop_at, ratio=ratio), **said)
        self.quarantine = Quarantine(self.sink)
        opened = self.sink.open(LOG) or Published(0, 0)
        self.position = opened.position
        self.tables = self.quarantine.with_parked_keys(opened.tables)

    def made(self, folder: Path, dead_letters: DeadLetterSettings, **said: Any) -> ParkingSink:
        """Its sink."""
        self.template = f"{folder}/lake/{{schema}}/{{table}}"
        rules = said.pop("rules", ())
        table = TableSettings(dead_letters=dead_letters, **said)
        return DeltaSink(DeltaSettings("lake", self.template, table=table, rules=rules))

    @property
    def record(self) -> TableRecord:
        return self.tables[ORDERS.relation]

    def merge(self, *rows: Any, upto: int, **control: Any) -> TableRecord:
        """Apply what came up to there, and publish nothing."""
        schema = control.pop("schema", ORDERS)
        return self.quarantine.apply(*self._behind(batch(list(rows), 0, upto, schema, **control)))

    def merge_folded(self, images: pa.Table, upto: int) -> TableRecord:
        """As merge, of rows as the fold hands them on."""
        whole = TableBatch(schema=ORDERS, rows=images, frame=None, after=0, upto=upto)
        return self.quarantine.apply(*self._behind(whole))

    def _behind(self, whole: TableBatch) -> tuple[TableRecord | None, TableBatch]:
        """(where the table stood, the batch as that which came after the last one that was published)."""
        before = self.tables.get(ORDERS.relation)
        after = min(before.position, self.position, whole.upto) if before else 0
        return before, replace(whole, after=after)

    def take(self, *rows: Any, upto: int, **control: Any) -> list[str]:
        """Apply and publish; the keys that are parked then."""
        self.publish(self.merge(*rows, upto=upto, **control), upto)
        return self.keys()

    def publish(self, record: TableRecord, upto: int) -> None:
        """Make what was applied the published cut."""
        self.tables, self.position = {ORDERS.relation: record}, upto
        self.sink.publish(Published(upto, 0, self.tables))
        self.quarantine.confirm_published()

    def keys(self) -> list[str]:
        return [key for (key,) in self.record.parked]

    def rows(self) -> dict[str, tuple[str | None, str | None]]:
        """Item and price by key, as the target has them now."""
        found = read_target(self.record.target).read_all().to_pylist()
        return {str(row["id"]): (row["item"], str(row["price"])) for row in found}

    def items(self) -> dict[str, str | None]:
        return {key: item for key, (item, _) in self.rows().items()}


class SearchDriver(Driver):
    """The same of a search sink."""

    def made(self, folder: Path, dead_letters: DeadLetterSettings, **_: Any) -> ParkingSink:
        self.path = folder / "find"
        return SearchSink("find", self.path, dead_letters=dead_letters)

    def rows(self) -> dict[str, tuple[str | None, str | None]]:
        found = SearchIndex.open(self.path).documents(ORDERS.topic)
        return {str(row.key[0]): (row.source["item"], row.source["price"]) for row in found}
