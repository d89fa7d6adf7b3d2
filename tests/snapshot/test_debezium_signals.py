"""Signals: each type of Debezium's becomes the commands that it means, once, or a refusal that says why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc.catalog import Catalog, Command, CommandState
from cdc.config import Definition
from cdc.errors import ConfigError
from cdc.log.writer import LogWriter
from cdc.pgoutput.decoder_events import SignalSeen
from cdc.position import Position
from cdc.snapshot.backfill_documents import BACKFILL, BackfillAction, BackfillRequest
from cdc.snapshot.debezium_signal_queue import FOLDER
from cdc.snapshot.debezium_signals import SIGNAL, Signals
from cdc.table import Column, ReplicaIdentity, TableSchema
from tests.log.rows import IDENTITY, LIMITS, info, row, table
from tests.snapshot.test_debezium_signal_queue import insert, keep_rows, signals_table

TABLES = ("orders", "order_items", "Mixed", "no_key", "odd[1].*", "signals")


class Desk:
    """The signals of one pipeline over a log with TABLES; `send` makes one that the log holds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._position = folder, 100
        self.definition = Definition.model_validate(
            {
                "name": "shop",
                "source": {"dsn": {"env": "DSN"}},
                "tables": [{"match": "shop.*"}],
                "log": {"path": str(folder)},
                "snapshot": {"signals": "shop.signals", "signal_secret": {"env": "SIGNALS"}},
                "catalog": {"url": f"sqlite:///{folder}/catalog.db"},
            },
            context={"environment": {"DSN": "postgresql://u@h/d", "SIGNALS": "s3cret"}},
        )
        self.signals = Signals(self.definition)
        self.signals.queue.set_schema(signals_table("id", "type", "data"))
        self.catalog = Catalog.open(self.definition.catalog.url)
        self._log = LogWriter.open(folder, IDENTITY, LIMITS)
        schemas = [known(number, name) for number, name in enumerate(TABLES, start=20)]
        rows = [row(1, n, op="s", topic=s.topic, payload=s.to_json()) for n, s in enumerate(schemas)]
        self._log.commit(self._log.stage(table(*rows)), info(self._position))

    def leave(self, kind: str, body: Any = None, *, message: bool = False) -> int:
        """A signal whose transaction the log does not hold yet; its position."""
        self._position += 100
        text = body if isinstance(body, str) or body is None else json.dumps(body)
        if message:
            content = json.dumps({"id": f"m{self._position}", "type": kind, "data": text, "secret": "s3cret"}).encode()
            self.signals.queue.store_message(SignalSeen(content, Position(self._position), 0))
        else:
            keep_rows(self.signals.queue, insert(self._position, [f"t{self._position}", kind, text]))
        return self._position

    def advance(self) -> None:
        """The log holds all that was left."""
        self._log.commit([], info(self._position))

    def send(self, kind: str, body: Any = None, *, message: bool = False) -> Command:
        """What came of one."""
        self.leave(kind, body, message=message)
        self.advance()
        self.signals.process(self.catalog)
        assert self.signals.pending() == []
        return self.catalog.commands.ls("shop", SIGNAL)[0]

    def refused(self, kind: str, body: Any = None, *, message: bool = False) -> str:
        """Why one was not carried out; nothing was posted."""
        before = self.posted()
        command = self.send(kind, body, message=message)
        assert command.state is CommandState.FAILED
        assert command.result is not None
        assert command.result["error"]["code"] == ConfigError.code
        assert self.posted() == before
        return str(command.result["error"]["message"])

    def posted(self) -> list[BackfillRequest]:
        """The backfills on their way, oldest first."""
        return [BackfillRequest.from_json(c.payload) for c in self.catalog.commands.pending("shop", BACKFILL)]

    def said(self, verb: BackfillAction) -> list[int]:
        """The backfills that were told so, oldest first."""
        return [c.payload["id"] for c in self.catalog.commands.pending("shop", verb.kind)]

    def post(self, *tables: str, resync: bool = False) -> int:
        """A backfill that somebody else asked for."""
        return self.catalog.commands.post("shop", BACKFILL, BackfillRequest(tables, resync=resync).to_json())

    def end(self, jobs: list[int]) -> None:
        """These backfills are done."""
        for job in jobs:
            self.catalog.commands.finish(job, {})


def known(oid: int, name: str) -> TableSchema:
    column = Column(id=1, name="id", type_oid=23, type_name="integer", key=None if name == "no_key" else 0)
    identity = ReplicaIdentity.FULL if name == "no_key" else ReplicaIdentity.DEFAULT
    return TableSchema(relation=oid, oid=oid, schema="shop", name=name, replica_identity=identity, columns=(column,))


@pytest.fixture(name="desk")
def _desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.catalog.close()


def execute(*collections: str, **more: Any) -> dict[str, Any]:
    return {"data-collections": list(collections)} | {name.replace("_", "-"): value for name, value in more.items()}


MEANT = [
    (["shop.orders"], ["shop.orders"]),
    ([" shop.orders "], ["shop.orders"]),
    (['"shop"."orders"'], ["shop.orders"]),
    (["shop.order_items", "shop.orders"], ["shop.order_items", "shop.orders"]),
    (["shop.orders", "shop.ord.*"], ["shop.order_items", "shop.orders"]),
    ([r"shop\.(orders|order_items)"], ["shop.order_items", "shop.orders"]),
    (["SHOP.MIXED"], ["shop.Mixed"]),
    (["shop.orders", "shop.none"], ["shop.orders"]),
    (['shop."odd[1].*"'], ['shop."odd[[]1].[*]"']),
]
"""Collections, and the tables that they mean."""


def test_a_snapshot_is_one_backfill_for_each_table_that_is_meant(desk: Desk) -> None:
    for collections, tables in MEANT:
        for message in (False, True):
            done = desk.send("execute-snapshot", execute(*collections), message=message)
            assert done.state is CommandState.DONE
            assert desk.posted() == [BackfillRequest((topic,)) for topic in tables]
            assert done.result is not None
            assert done.result["backfills"] == [c.id for c in desk.catalog.commands.pending("shop", BACKFILL)]
            desk.end(done.result["backfills"])


def test_everything_is_all_tables_but_that_of_signals_and_what_cannot_be_is_named(desk: Desk) -> None:
    done = desk.send("execute-snapshot", execute(".*", "shop.none", type="INCREMENTAL"))
    assert [r.tables[0] for r in desk.posted()] == [
        'shop."odd[[]1].[*]"',
        "shop.Mixed",
        "shop.order_items",
        "shop.orders",
    ]
    assert done.result is not None
    assert set(done.result["refused"]) == {"shop.no_key", "shop.none"}


def test_each_table_has_the_first_filter_that_means_it(desk: Desk) -> None:
    conditions = [
        {"data-collection": "shop.orders", "filter": "id > 5"},
        {"data-collection": "shop\\.ord.*", "filter": "id > 7"},
    ]
    desk.send("execute-snapshot", execute("shop.ord.*", "shop.Mixed", additional_conditions=conditions))
    assert {r.tables[0]: r.where for r in desk.posted()} == {
        "shop.orders": "id > 5",
        "shop.order_items": "id > 7",
        "shop.Mixed": None,
    }


def test_the_older_single_condition_is_every_tables(desk: Desk) -> None:
    desk.send("execute-snapshot", execute("shop.ord.*", additional_condition="id = 1"))
    assert [r.where for r in desk.posted()] == ["id = 1", "id = 1"]


REFUSED: list[tuple[Any, str | None]] = [
    (None, "'data-collections' of the signal is missing or empty"),
    (execute(), "'data-collections' of the signal is missing or empty"),
    (execute(" "), "'data-collections' of the signal is missing or empty"),
    ("{", "expected a JSON object"),
    ("[]", "expected a JSON object"),
    (
        {"data-collections": "shop.orders"},
        "'data-collections' of the signal is malformed: expected a list of texts",
    ),
    ({"data-collections": [1]}, "'data-collections' of the signal is malformed: expected a list of texts"),
    (execute("shop.none"), "'shop.none': no table of the log matches"),
    (execute("shop.no_key"), "'shop.no_key': table 'shop.no_key' has no key"),
    (execute("shop.(orders"), "neither a table nor a regular expression"),
    (execute(r"(shop)\.\1"), "neither a table nor a regular expression"),
    (execute("shop.orders", type="blocking"), "would stop the stream"),
    (execute("shop.orders", type="BLOCKING"), "would stop the stream"),
    (execute("shop.orders", type="initial"), "unknown type of snapshot 'initial'"),
    (execute("shop.orders", surrogate_key="code"), "'surrogate-key', which is not supported"),
    (execute("shop.orders", additional_conditions={}), None),
    (execute("shop.orders", additional_conditions="x"), "'additional-conditions' of the signal is malformed"),
    (execute("shop.orders", additional_conditions=[{"filter": "x"}]), "has an entry without 'data-collection'"),
    (execute("shop.orders", additional_conditions=["x"]), "has an entry without 'data-collection'"),
]
"""What a signal says, and why it is not carried out; None if it is."""


def test_what_cannot_be_is_refused_with_the_reason(desk: Desk) -> None:
    for body, says in REFUSED:
        if says is None:
            assert desk.send("execute-snapshot", body).state is CommandState.DONE
        else:
            assert says in desk.refused("execute-snapshot", body), body


def test_a_filter_in_a_message_is_refused_for_anybody_may_send_one(desk: Desk) -> None:
    conditions = [{"data-collection": "shop.orders", "filter": "pg_drop_replication_slot('other') IS NULL"}]
    body = execute("shop.orders", additional_conditions=conditions)
    assert "any role that knows the secret can send a message" in desk.refused("execute-snapshot", body, message=True)
    assert "any role that knows the secret can send a message" in desk.refused(
        "execute-snapshot", execute("shop.orders", additional_condition="true"), message=True
    )


def test_an_expression_made_to_take_for_ever_does_not(desk: Desk) -> None:
    assert "no table" in desk.refused("execute-snapshot", execute(r"(([a-z._]+)+)+!", "(a|a)*" * 50), message=True)


VERBS = {
    "pause-snapshot": BackfillAction.PAUSE,
    "resume-snapshot": BackfillAction.RESUME,
    "stop-snapshot": BackfillAction.CANCEL,
}


def test_all_that_is_on_its_way_is_told(desk: Desk) -> None:
    for kind, verb in VERBS.items():
        ended = desk.post("shop.orders")
        desk.catalog.commands.finish(ended, {})
        jobs = [desk.post("shop.orders"), desk.post("shop.*")]
        done = desk.send(kind, None if verb is not BackfillAction.CANCEL else {"type": "INCREMENTAL"})
        assert done.result == {"backfills": jobs, "left": []}
        assert desk.said(verb) == jobs
        desk.end(jobs)


def test_details_of_a_pause_are_not_looked_at(desk: Desk) -> None:
    job = desk.post("shop.orders")
    desk.send("pause-snapshot", "no JSON")
    assert desk.said(BackfillAction.PAUSE) == [job]


def test_nothing_on_its_way_is_nothing_to_stop(desk: Desk) -> None:
    assert desk.send("stop-snapshot").result == {"backfills": [], "left": []}


def test_a_stop_with_tables_ends_what_is_about_no_other_table(desk: Desk) -> None:
    one, both, other = desk.post("shop.orders"), desk.post("shop.ord*"), desk.post("shop.Mixed")
    assert desk.send("stop-snapshot", execute("shop.orders")).result == {"backfills": [one], "left": [both]}
    assert desk.send("stop-snapshot", execute("shop.ord.*")).result == {"backfills": [one, both], "left": []}
    assert other not in desk.said(BackfillAction.CANCEL)


def test_a_stop_leaves_full_copies_and_a_pause_does_not(desk: Desk) -> None:
    copy, backfill = desk.post("shop.Mixed", resync=True), desk.post("shop.orders")
    assert desk.send("stop-snapshot").result == {"backfills": [backfill], "left": [copy]}
    assert desk.send("pause-snapshot").result == {"backfills": [copy, backfill], "left": []}


def test_a_stop_of_a_blocking_snapshot_is_refused(desk: Desk) -> None:
    assert "blocking" in desk.refused("stop-snapshot", {"type": "blocking"})


def test_a_signal_waits_until_the_log_holds_its_transaction(desk: Desk) -> None:
    """Until then the server may send it again, and the log may not know a table that it names."""
    desk.leave("execute-snapshot", execute("shop.orders"))
    desk.signals.process(desk.catalog)
    assert desk.posted() == []
    desk.advance()
    desk.signals.process(desk.catalog)
    desk.signals.process(desk.catalog)
    assert desk.posted() == [BackfillRequest(("shop.orders",))]


def test_signals_are_carried_out_in_the_order_of_the_stream(desk: Desk) -> None:
    desk.leave("execute-snapshot", execute("shop.orders"))
    desk.leave("stop-snapshot")
    desk.leave("execute-snapshot", execute("shop.orders"))
    desk.advance()
    desk.signals.process(desk.catalog)
    first, second = (c.id for c in desk.catalog.commands.pending("shop", BACKFILL))
    assert first < second
    assert desk.said(BackfillAction.CANCEL) == [first]


def test_a_snapshot_that_was_interrupted_asks_for_what_it_had_not_asked_for_yet(desk: Desk) -> None:
    """As a process leaves it that died between two of its posts."""
    desk.leave("execute-snapshot", execute("shop.ord.*"))
    desk.advance()
    (signal,) = desk.signals.pending()
    desk.post("shop.orders")  # somebody else's, of before
    desk.catalog.commands.post("shop", SIGNAL, {"key": signal.key})
    asked = desk.post("shop.order_items")
    desk.signals.process(desk.catalog)
    done = desk.catalog.commands.ls("shop", SIGNAL)[0]
    assert done.state is CommandState.DONE
    assert done.result is not None
    assert done.result["backfills"][0] == asked
    assert [r.tables[0] for r in desk.posted()] == ["shop.orders", "shop.order_items", "shop.orders"]


def test_a_word_that_was_interrupted_is_said_to_those_who_have_not_heard_it(desk: Desk) -> None:
    for kind, verb in VERBS.items():
        jobs = [desk.post("shop.orders"), desk.post("shop.Mixed")]
        desk.leave(kind)
        desk.advance()
        (signal,) = desk.signals.pending()
        desk.catalog.commands.post("shop", SIGNAL, {"key": signal.key})
        desk.catalog.commands.post("shop", verb.kind, {"id": jobs[0]})
        desk.signals.process(desk.catalog)
        assert desk.said(verb) == jobs
        desk.end(jobs)


def test_one_that_was_finished_but_not_removed_is_only_removed(desk: Desk) -> None:
    desk.leave("execute-snapshot", execute("shop.orders"))
    desk.advance()
    (signal,) = desk.signals.pending()
    desk.catalog.commands.finish(desk.catalog.commands.post("shop", SIGNAL, {"key": signal.key}), {})
    desk.signals.process(desk.catalog)
    assert (desk.posted(), desk.signals.pending()) == ([], [])


def test_who_asked_is_in_the_audit(desk: Desk) -> None:
    desk.send("execute-snapshot", execute("shop.orders"))
    desk.send("pause-snapshot")
    assert [(a.actor, a.action) for a in desk.catalog.audit.ls()] == [
        ("signal t300", "backfill pause"),
        ("signal t200", "backfill"),
    ]


def test_a_file_that_cannot_be_read_does_not_end_the_thread(desk: Desk) -> None:
    desk.send("pause-snapshot")
    (desk.folder / FOLDER / "x.json").write_text("{")
    desk.signals.process(desk.catalog)
