"""Skipping a table over the API: a command for the reader, or a refusal that names the way out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from cdc.catalog import Catalog
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.service.api.app import create_app
from cdc.snapshot.backfill_documents import BackfillRequest
from cdc.snapshot.reader_commands import SKIP_TABLES
from cdc.table import TableState
from tests.log.rows import LIMITS, info, row, table
from tests.service.api.test_job_routes import code
from tests.service.pipeline import NAME, copy_log, copying, definition, fill, new_catalog
from tests.service.running import answering, client_of

TABLES = f"/api/v1/pipelines/{NAME}/tables"


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    copy_log(tmp_path)
    found = next(s for s in LogReader(tmp_path / "log").schemas().values() if s.topic == "shop.orders")
    marked = replace(found, state=TableState.NEEDS_RESYNC, reason="nobody knows")
    told = row(
        2, 0, op="s", relation=marked.relation, topic=marked.topic, key=None, after=None, payload=marked.to_json()
    )
    writer = LogWriter(tmp_path / "log", LIMITS)
    writer.commit(writer.stage(table(told)), info(2))
    with new_catalog(tmp_path) as opened:
        fill(opened)
        yield opened


@pytest.fixture
def client(catalog: Catalog, tmp_path: Path) -> Iterator[httpx.Client]:
    app = create_app(catalog, definition(tmp_path), str(tmp_path / "log"))
    with answering(app) as url, client_of(url, timeout=60) as opened:
        yield opened


def test_a_table_in_doubt_is_skipped_and_who_asked_stands_in_the_audit(client: httpx.Client, catalog: Catalog) -> None:
    answer = client.post(f"{TABLES}/shop.orders/skip", json={})
    (command,) = catalog.commands.pending(NAME, SKIP_TABLES)
    assert (answer.status_code, answer.json()) == (202, {"id": command.id, "table": "shop.orders"})
    assert command.payload == {"tables": ["shop.orders"]}
    assert [(line.actor, line.action) for line in catalog.audit.ls()] == [("api from 127.0.0.1", "tables skip")]


def test_a_table_that_is_live_unknown_or_being_copied_is_not_skipped(client: httpx.Client, catalog: Catalog) -> None:
    assert code(client.post(f"{TABLES}/shop.customers/skip", json={})) == (409, "CDC-1006")
    assert code(client.post(f"{TABLES}/shop.none/skip", json={})) == (404, "CDC-5010")
    job = copying(catalog, "shop.orders", BackfillRequest(("shop.orders",), resync=True))
    answer = client.post(f"{TABLES}/shop.orders/skip", json={})
    assert code(answer) == (409, "CDC-1006")
    assert f"cdc backfill cancel {job}" in answer.json()["suggestion"]
    assert catalog.commands.ls(NAME, SKIP_TABLES) == []


def test_the_description_says_where_tables_are_added(client: httpx.Client) -> None:
    described = client.get("/api/v1/openapi.json").json()["paths"]
    skip = next(path for name, path in described.items() if name.endswith("/skip"))
    assert "cdc tables add" in skip["post"]["description"]
    assert not any(name.endswith(("/add", "/remove")) for name in described)
