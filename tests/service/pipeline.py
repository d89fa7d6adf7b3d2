"""A pipeline as the server sees it: a definition, and a catalog with what its processes last said."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cdc.catalog import Catalog, ProcessReport, SinkProgress, TableProgress
from cdc.config import Definition
from cdc.log.writer import LogWriter
from cdc.metrics import APPLY_ROWS, CHANGES, LOG_POSITION, SLOT_RETAINED, SOURCE_LAG_BYTES, SOURCE_LAG_SECONDS, Metrics
from cdc.snapshot.backfill_documents import BACKFILL, BackfillRequest, BackfillState, TableBackfillState
from cdc.table import split_topic
from tests.fixtures.catalog import put_catalog
from tests.log.rows import IDENTITY, LIMITS, info, row, schema_of, table

NAME = "shop"
TOKEN = "canary-of-32-characters-0123456789"
"""What `{env: SHOP_TOKEN}` leads to."""
LOG_END = 0x16B3F2C8
COMMITTED = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


def definition(directory: Path, dsn: str = "postgresql://reader@db.internal:5432/shop", **service: Any) -> Definition:
    """A pipeline with two sinks; nothing of it exists but the catalog."""
    return Definition.model_validate(
        {
            "version": 1,
            "name": NAME,
            "source": {"dsn": {"env": "SHOP_DSN"}},
            "tables": [{"match": "shop.*"}],
            "log": {"path": str(directory / "log")},
            "sinks": [
                {"type": "delta", "name": "lake", "path": str(directory / "lake/{schema}/{table}")},
                {"type": "search", "name": "find", "path": str(directory / "search")},
            ],
            "catalog": {"url": f"sqlite:///{directory / 'catalog.db'}"},
            "service": {"port": 0, **service},
        },
        context={"environment": {"SHOP_DSN": dsn, "SHOP_TOKEN": TOKEN}},
    )


def write_log(directory: Path) -> None:
    """A log that knows the tables, each with the key `id`, and holds none of their rows."""
    writer = LogWriter.open(directory / "log", IDENTITY, LIMITS)
    schemas = [replace(schema_of(100 + n, "note"), name=split_topic(topic)[1]) for n, topic in enumerate(TABLES)]
    rows = [
        row(1, n, op="s", relation=s.relation, topic=s.topic, key=None, after=None, payload=s.to_json())
        for n, s in enumerate(schemas)
    ]
    writer.commit(writer.stage(table(*rows)), info(1))


@cache
def _written() -> TemporaryDirectory[str]:
    """A folder with such a log."""
    folder = TemporaryDirectory()
    write_log(Path(folder.name))
    return folder


def copy_log(directory: Path) -> None:
    """The log of `write_log`, copied: that costs a quarter."""
    shutil.copytree(Path(_written().name, "log"), directory / "log")


def new_catalog(directory: Path) -> Catalog:
    """A new catalog where the definition has it, opened."""
    put_catalog(directory)
    return Catalog.open(definition(directory).catalog.url)


def copying(catalog: Catalog, topic: str, request: BackfillRequest, **work: Any) -> int:
    """A copy of the table that has come so far; work are fields of its TableWork. Hands back the command's number."""
    job = catalog.commands.post(NAME, BACKFILL, request.to_json())
    if work:
        catalog.commands.record(job, BackfillState("snapshotting", {topic: TableBackfillState(**work)}).to_json())
    return job


def fill(catalog: Catalog, *, rows: float = 12_480) -> None:
    """What a healthy pipeline has told the catalog this moment."""
    reader, apply = Metrics(), Metrics()
    reader.set(SOURCE_LAG_SECONDS, 0.02, NAME)
    reader.set(SOURCE_LAG_BYTES, 4096, NAME, "durable")
    reader.set(LOG_POSITION, LOG_END, NAME)
    reader.set(SLOT_RETAINED, 1_100_000, NAME)
    reader.add(CHANGES, rows, NAME)
    apply.add(APPLY_ROWS, rows - 80, NAME, "lake")
    apply.add(APPLY_ROWS, 200, NAME, "find")
    catalog.processes.report(ProcessReport(NAME, "reader", 4711, "running", None, reader.to_json()))
    catalog.processes.report(ProcessReport(NAME, "apply", 4712, "running", None, apply.to_json()))
    catalog.sinks.record(NAME, SinkProgress("lake", LOG_END - 52_000, COMMITTED, 0.61, "running"))
    catalog.sinks.record(NAME, SinkProgress("find", LOG_END - 800, COMMITTED, 0.18, "running"))
    catalog.tables.record(NAME, [table for topic, count in TABLES.items() for table in _places(topic, count)])


TABLES = {"shop.customers": 1_000, "shop.orders": 5_000, "shop.order_items": 15_210, "shop.products": 200}


def _places(topic: str, rows: int) -> list[TableProgress]:
    places = [
        TableProgress("", topic, "streaming", None, LOG_END, None, rows),
        TableProgress("lake", topic, "streaming", None, LOG_END - 52_000, 17, rows),
    ]
    if topic == "shop.products":
        places.append(TableProgress("find", topic, "streaming", None, LOG_END - 800, None, rows))
    return places
