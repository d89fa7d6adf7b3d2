"""`cdc backfill` and `cdc tables`: what they ask of the reader, what they refuse, and what they show of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc.catalog import Catalog, TableProgress
from cdc.snapshot.backfill_documents import (
    BACKFILL,
    KEYS,
    BackfillAction,
    BackfillRequest,
    BackfillState,
    TableBackfillState,
)
from cdc.snapshot.backfill_status import KEYS_SHOWN
from tests.cli.command import Outcome, run
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql

WORK = {"public.t": TableBackfillState("snapshotting", rows=250, estimate=1_000, seconds=0.5)}


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        "CREATE SEQUENCE s",
        "CREATE SCHEMA raw",
        "CREATE TABLE raw.lines (v text)",
        "ALTER TABLE raw.lines REPLICA IDENTITY FULL",
    )
    held = Captured(tmp_path, database, tables="*.*")
    held.copy()
    return held


@pytest.fixture(name="catalog")
def _catalog(held: Captured) -> Iterator[Catalog]:
    with Catalog.open(held.definition.catalog.url) as catalog:
        yield catalog


class Command:
    """`cdc` with the definition, in lines and as JSON."""

    def __init__(self, held: Captured, capsys: pytest.CaptureFixture[str]) -> None:
        self._held, self._capsys = held, capsys

    @property
    def definition(self) -> Path:
        return self._held.path

    def __call__(self, *arguments: object) -> Outcome:
        return run(self._capsys, *arguments, "-c", self.definition)

    def result(self, *arguments: object) -> Any:
        outcome = self(*arguments, "--json")
        assert outcome.status == 0
        return outcome.envelope["result"]


@pytest.fixture(name="cdc")
def _cdc(held: Captured, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(held, capsys)


def test_a_backfill_is_asked_for_and_shown_until_it_is_done_and_gets_verbs_until_it_has_ended(
    cdc: Command, catalog: Catalog
) -> None:
    asked = cdc.result("backfill", "public.t", "--where", "id > 5", "--rate", "100")
    assert asked["tables"] == ["public.t"]
    (command,) = catalog.commands.pending("held", BACKFILL)
    assert BackfillRequest.from_json(command.payload) == BackfillRequest(("public.t",), where="id > 5", rate=100)
    assert cdc.result("backfill", "show", asked["id"])["state"] == "queued"
    catalog.commands.record(command.id, BackfillState("snapshotting", dict(WORK)).to_json())
    shown = cdc.result("backfill", "show", asked["id"])
    assert shown["tables"]["public.t"] | {"rows": 250, "rows_per_second": 500.0} == shown["tables"]["public.t"]
    catalog.commands.finish(
        command.id, BackfillState("done", {"public.t": TableBackfillState("done", rows=300)}).to_json()
    )
    assert [one["state"] for one in cdc.result("backfill", "ls")["backfills"]] == ["done"]
    assert [line.action for line in catalog.audit.ls()] == ["backfill"]
    for verb in BackfillAction:
        job = cdc.result("backfill", "public.t")["id"]
        assert cdc("backfill", verb.value, job).status == 0
        assert [command.payload for command in catalog.commands.pending("held", verb.kind)] == [{"id": job}]
        catalog.commands.finish(job, BackfillState("cancelled").to_json(), ok=False)
        late = cdc("backfill", verb.value, job)
        assert (late.status, "already ended with state cancelled" in late.errors) == (2, True)

    # a table is in one backfill at a time
    first = cdc.result("backfill", "public.t", "--keys", "..5")["id"]
    refused = cdc("backfill", "public.*", "--keys", "6..", "--json").envelope
    assert (refused["error"]["code"], str(first) in refused["error"]["suggestion"]) == ("CDC-1006", True)
    assert cdc("backfill", "public.u").status == 0


def test_people_read_the_figures_that_programs_get_and_where_tables_stand(cdc: Command, catalog: Catalog) -> None:
    job = cdc.result("tables", "resync", "public.t")["id"]
    catalog.commands.record(job, BackfillState("snapshotting", dict(WORK)).to_json())
    words = "250 rows of about 1,000 · 25% · 500 rows/s · 2 s left"
    for arguments in (("backfill", "show", job), ("backfill", "ls"), ("status",)):
        assert words in cdc(*arguments).output
    catalog.tables.record("held", [TableProgress("", "public.t", "snapshotting", None, 1, None, 0)])
    for arguments in (("tables", "ls"), ("status",)):
        assert words in cdc(*arguments).output
    (table,) = (t for t in cdc("status", "--json").envelope["result"]["tables"] if t["topic"] == "public.t")
    assert (table["state"], table["progress"]["share"]) == ("snapshotting", 0.25)
    catalog.commands.finish(job, BackfillState("done").to_json())

    # tables with their number and where they stand
    with cdc.definition.open("a") as definition:
        definition.write("sinks: [{type: delta, name: lake, path: 'lake/{schema}/{table}'}]\n")
    tables = [
        TableProgress("", "public.t", "needs_resync", "why", 1, None, 12),
        TableProgress("lake", "public.t", "failed", "full", 1, 3, 7),
    ]
    catalog.tables.record("held", tables)
    first, second, _ = cdc.result("tables", "ls")["tables"]
    assert (first["topic"], first["state"], first["reason"], first["rows"]) == ("public.t", "needs_resync", "why", 12)
    assert [(sink["sink"], sink["state"], sink["version"]) for sink in first["sinks"]] == [("lake", "failed", 3)]
    assert (second["topic"], second["state"], second["sinks"]) == ("public.u", "streaming", [])
    assert {type(first["relation"]), type(second["relation"])} == {int}
    people = cdc("tables", "ls").output
    assert all(
        word in people for word in ("public.t", "needs_resync", "why", "lake failed", "full", str(first["relation"]))
    )


def test_listed_keys_come_from_options_and_a_file_each_once_and_of_a_long_list_only_the_beginning_is_shown(
    cdc: Command, catalog: Catalog, tmp_path: Path
) -> None:
    file = tmp_path / "keys.csv"
    file.write_text('7\n\n"8"\n007\n', encoding="utf-8-sig")
    job = cdc.result("backfill", "public.t", "--key", "9", "--key", "8", "--keys-from", file)["id"]
    (command,) = catalog.commands.pending("held", BACKFILL)
    assert BackfillRequest.from_json(command.payload).keys == (("9",), ("8",), ("7",), ("007",))
    shown = cdc.result("backfill", "show", job)
    assert (shown["keys"], shown["request"]["keys"]) == (4, [["9"], ["8"], ["7"], ["007"]])
    assert shown["command"] == "cdc backfill public.t --key 9 --key 8 --key 7 --key 007 -c FILE"

    catalog.commands.finish(job, BackfillState("done").to_json())
    file.write_text("".join(f"{number}\n" for number in range(KEYS)))
    cdc.result("backfill", "public.t", "--keys-from", file)
    (shown,) = (one for one in cdc.result("backfill", "ls")["backfills"] if one["id"] != job)
    assert (shown["keys"], len(shown["request"]["keys"])) == (KEYS, KEYS_SHOWN)
    assert shown["command"] == "cdc backfill public.t --keys-from LIST -c FILE"


IMPOSSIBLE: list[tuple[object, ...]] = [
    ("backfill", "public.none"),
    ("backfill", "public.t", "--sink", "none"),
    ("backfill", "public.t", "--where", "v >"),
    ("backfill", "public.t", "--where", "1) OR (1"),
    ("backfill", "public.t", "--where", "setval('s', 7) > 0"),
    ("backfill", "public.t", "--where", "pg_sleep(600) IS NULL"),
    ("backfill", "public.t", "--keys", "5"),
    ("backfill", "public.t", "--keys", "1,2..3,4"),
    ("backfill", "public.t", "--rate", "0"),
    ("backfill", "public.t", "--key", "7", "--key", "seven"),
    ("backfill", "public.t", "--key", "7,8"),
    ("backfill", "public.t", "--key", ""),
    ("backfill", "public.t", "--key", '"7'),
    ("backfill", "public.*", "--key", "7"),
    ("backfill", "public.t", "--key", "7", "--keys", "1..9"),
    ("backfill", "public.t", "--keys-from", "/nowhere"),
    ("backfill", "raw.lines", "--keys", "1..9"),
    ("backfill", "raw.lines", "--key", "7"),
    ("backfill", "raw.lines"),
    ("backfill", "*", "--keys", "1..9"),
    ("tables", "resync", "public.none"),
    ("backfill", "show", "77"),
    ("backfill", "pause", "77"),
]


def test_what_cannot_be_done_is_a_usage_error_with_the_way_out_and_starts_nothing(
    cdc: Command, catalog: Catalog
) -> None:
    for arguments in IMPOSSIBLE:
        outcome = cdc(*arguments)
        assert (outcome.status, "→" in outcome.errors) == (2, True), arguments
    assert catalog.commands.ls("held", BACKFILL) == []
    assert catalog.audit.ls() == []

    # of a table without a key the way out is a copy of all of it
    refused = cdc("backfill", "raw.lines", "--keys", "1..9", "--json").envelope["error"]
    assert "'raw.lines' has no key" in refused["message"]
    assert "cdc tables resync 'raw.lines'" in refused["suggestion"]
    assert cdc("tables", "resync", "raw.lines").status == 0
