"""A Delta sink that keeps history and parks rows, one driver after the other, and log rows for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cdc.catalog.dead_letter_requests import DeadLetterAction
from cdc.config import DeadLetterSettings, TypeSettings
from cdc.config.delta_sink import HistoryMode
from cdc.table import TableSchema
from cdc.targets.published_record import TableRecord
from pipelines.dead_letters.quarantine import Quarantine
from pipelines.sinks.contract import Published
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import PRICE
from tests.contracts.histories import RELATION, SETTINGS, TABLE, Lake, batch
from tests.pipelines.fold_model import PLAIN, Row, log_row

PRICED = replace(TABLE, columns=(TABLE.columns[0], replace(PRICE, id=PLAIN, name="plain"), *TABLE.columns[2:]))
AS_TEXT: dict[str, Any] = {"columns": {"plain": TypeSettings.TEXT}}


class ParkingHistorySink(Lake):
    """A sink that parks, and one driver of it after the other."""

    def start(self) -> None:
        self.sink = DeltaSink(self._settings)
        self.quarantine = Quarantine(self.sink)
        opened = self.sink.open("log-1") or Published(0, 0)
        self.tables = self.quarantine.with_parked_keys(opened.tables)

    def apply(self, rows: Sequence[Row], after: int, upto: int, schema: TableSchema = PRICED) -> TableRecord:
        return self.quarantine.apply(self.tables.get(RELATION), batch(rows, after, upto, schema))

    def take(self, rows: Sequence[Row], upto: int, schema: TableSchema = PRICED) -> list[str]:
        """The next batch, published; the first parts of the keys that are parked then."""
        before = self.tables.get(RELATION)
        record = self.apply(rows, min(before.position, upto) if before else 0, upto, schema)
        self.tables = {RELATION: record}
        self.publish(record, upto)
        self.quarantine.confirm_published()
        return [key[0] for key in record.parked]

    def ask(self, verb: DeadLetterAction) -> None:
        """Of every parked key."""
        for row in self.quarantine.rows:
            self.quarantine.request((RELATION, row.key), verb)


def open_parking_sink(folder: Path, keeping: HistoryMode, stop_at: int = 100, **said: Any) -> ParkingHistorySink:
    table = SETTINGS[keeping].model_copy(update={"dead_letters": DeadLetterSettings(stop_at=stop_at), **said})
    return ParkingHistorySink(str(folder), table)


def complete_row(position: int, key: int, price: str, op: str = "u", **more: Any) -> Row:
    image = {1: str(key), 2: price, 3: f"l{position}", 4: "h"}
    return log_row(RELATION, (position, 0), op, key=[str(key)], **{"after": image, **more})


def partial_row(position: int, key: int, price: str, **more: Any) -> Row:
    return complete_row(position, key, price, after={1: str(key), 2: price}, partial=True, **more)


def deleted_row(position: int, key: int) -> Row:
    return log_row(RELATION, (position, 0), "d", key=[str(key)], before={1: str(key)})
