"""Reader commands: what is posted, what conflicts, and how long an answer is awaited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.errors import StateConflict, UnknownName
from cdc.log.writer import LogWriter
from cdc.snapshot.backfill_documents import BACKFILL, BackfillAction, BackfillRequest
from cdc.snapshot.reader_commands import (
    CHECK_TABLES,
    SKIP_TABLES,
    check_not_copying,
    request_keys,
    request_skip,
    request_table_check,
    send_action,
    wait_for_answer,
    wait_for_backfill,
)
from cdc.table import TableState
from tests.faults.capture import Captured
from tests.log.rows import IDENTITY, LIMITS, info, row, schema_of, table

PIPELINE = "held"
ORDERS = ("shop.orders",)


@pytest.fixture(name="pipeline")
def _pipeline(tmp_path: Path) -> Captured:
    """A log of one table that needs a resync, and a source that does not answer."""
    writer = LogWriter.open(tmp_path / "log", IDENTITY, LIMITS)
    marked = schema_of(16384).flagged(TableState.NEEDS_RESYNC, "changes were skipped")
    writer.commit(writer.stage(table(row(5, op="s", key=None, after=None, payload=marked.to_json()))), info(5))
    return Captured(tmp_path, "postgresql://nobody@127.0.0.1:1/nothing", slot="cdc_commands")


@pytest.fixture(name="catalog")
def _catalog(pipeline: Captured) -> Iterator[Catalog]:
    with Catalog.open(pipeline.definition.catalog.url) as catalog:
        yield catalog


def test_a_skip_is_posted_for_inexact_tables_and_audited(pipeline: Captured, catalog: Catalog) -> None:
    job, topics = request_skip(pipeline.definition, catalog, ["shop.*"], "me")
    (command,) = catalog.commands.pending(PIPELINE, SKIP_TABLES)
    assert (command.id, command.payload, topics) == (job, {"tables": ["shop.orders"]}, ["shop.orders"])
    assert [(line.actor, line.action) for line in catalog.audit.ls()] == [("me", "tables skip")]
    with pytest.raises(UnknownName, match="no table of the log matches 'none'"):
        request_skip(pipeline.definition, catalog, ["none"], "me")


def test_a_table_is_not_skipped_while_it_is_copied(pipeline: Captured, catalog: Catalog) -> None:
    check_not_copying(catalog, PIPELINE, ORDERS)
    job = catalog.commands.post(PIPELINE, BACKFILL, BackfillRequest(ORDERS, resync=True).to_json())
    for command in (
        lambda: check_not_copying(catalog, PIPELINE, ORDERS),
        lambda: request_skip(pipeline.definition, catalog, ["shop.*"], "me"),
    ):
        with pytest.raises(StateConflict, match=f"copy {job} of shop.orders is running"):
            command()


def test_an_action_is_posted_for_a_pending_backfill_only(catalog: Catalog) -> None:
    job = catalog.commands.post(PIPELINE, BACKFILL, BackfillRequest(ORDERS).to_json())
    assert send_action(catalog, PIPELINE, job, BackfillAction.PAUSE, "me").state == "queued"
    assert [c.payload for c in catalog.commands.pending(PIPELINE, BackfillAction.PAUSE.kind)] == [{"id": job}]
    catalog.commands.finish(job, {})
    with pytest.raises(StateConflict, match=f"backfill {job} has already ended"):
        send_action(catalog, PIPELINE, job, BackfillAction.CANCEL, "me")


def test_a_request_that_overlaps_a_pending_backfill_is_refused(pipeline: Captured, catalog: Catalog) -> None:
    request = BackfillRequest(ORDERS, resync=True)
    posted = request_keys(pipeline.definition, catalog, request, "me")
    assert posted.tables == ORDERS
    with pytest.raises(StateConflict, match=f"backfill {posted.id} is already running for shop.orders"):
        request_keys(pipeline.definition, catalog, request, "me")


def test_an_answer_is_awaited_for_a_limited_time(catalog: Catalog) -> None:
    job = request_table_check(catalog, PIPELINE)
    assert wait_for_answer(catalog, job, 0) is None
    catalog.commands.finish(job, {"added": []})
    answer = wait_for_answer(catalog, job)
    assert answer is not None
    assert (answer.kind, answer.result) == (CHECK_TABLES, {"added": []})
    backfill = catalog.commands.post(PIPELINE, BACKFILL, BackfillRequest(ORDERS).to_json())
    assert wait_for_backfill(catalog, PIPELINE, backfill, 0).pending
