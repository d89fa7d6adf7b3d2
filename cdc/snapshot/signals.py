"""Signals: what Debezium's signals ask for, as commands to the backfills of this pipeline.

`execute-snapshot` of type `incremental` becomes one backfill per table, so that each has its own filter and can be
stopped alone; `stop-`, `pause-` and `resume-snapshot` become commands about those that are on their way, whoever asked
for them. A command of kind SIGNAL notes in the catalog what came of each, and by its number what was posted for it: one
that was interrupted is carried out to its end and not twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import structlog

from cdc.catalog import Catalog, CommandState
from cdc.config import Definition
from cdc.errors import ConfigError, LogError, StateConflict
from cdc.failpoint import hit
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.snapshot.backfill_progress import covers
from cdc.snapshot.backfill_requests import send_action
from cdc.snapshot.backfill_state import BACKFILL, BackfillAction, BackfillRequest, check_request
from cdc.snapshot.signal_queue import (
    LOGGED_CHARACTERS,
    SIGNALS_LIMIT,
    Channel,
    Signal,
    SignalQueue,
    SignalType,
    parse_json_object,
)
from cdc.table import TableSchema, TableState, exact_glob, split_topic

SIGNAL: Final = "signal"
"""The kind of command that notes a signal; it is nobody's to carry out but ours."""
_VERBS: Final = {
    SignalType.STOP: BackfillAction.CANCEL,
    SignalType.PAUSE: BackfillAction.PAUSE,
    SignalType.RESUME: BackfillAction.RESUME,
}

log = structlog.get_logger("signals")


class Signals:
    """The signals of one pipeline; used by the thread that carries out backfills."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self.inbox = SignalQueue(definition.log.root, definition.snapshot.signals)
        """Where the decoding thread leaves them."""

    def pending(self) -> list[Signal]:
        """Those whose transaction the log holds, in its order; nearly free while there are none. Raises LogError."""
        if not (waiting := self.inbox.waiting()):
            return []
        held = LogReader(self._definition.log.root).durable or Position(0)
        return [signal for signal in waiting if signal.position <= held]

    def serve(self, catalog: Catalog) -> None:
        """Carry out those that are pending; the source is not asked.

        Raises CatalogUnavailable; what else goes wrong stands in the result of the signal's command and in what we log.
        """
        try:
            for signal in self.pending():
                self._take_up(catalog, signal)
        except LogError as exc:
            log.warning("signals wait", code=exc.code, message=exc.message)

    def _take_up(self, catalog: Catalog, signal: Signal) -> None:
        noted = catalog.commands.ls(self._definition.name, SIGNAL, limit=SIGNALS_LIMIT)
        command = next((c for c in noted if c.payload["key"] == signal.key), None)
        told = {"id": signal.id, "type": signal.type.value, "channel": signal.channel.value}
        if command is None:
            payload = {"key": signal.key, "position": str(Position(signal.position)), **told}
            number = catalog.commands.post(self._definition.name, SIGNAL, payload)
            hit("signal_noted")
        else:
            number = command.id
        if command is None or command.state is CommandState.PENDING:
            shown = told | {"id": signal.id[:LOGGED_CHARACTERS]}
            self._finish(catalog, number, signal, shown)
        self.inbox.remove(signal)

    def _finish(self, catalog: Catalog, number: int, signal: Signal, shown: Mapping[str, str]) -> None:
        carry_out = self._execute if signal.type is SignalType.EXECUTE else self._speak
        try:
            result = carry_out(catalog, number, signal)
        except ConfigError as exc:
            log.warning("signal refused", **shown, code=exc.code, message=exc.message, fix=exc.fix)
            said = {"code": exc.code, "message": exc.message, "suggestion": exc.fix}
            catalog.commands.finish(number, {"error": said}, ok=False)
            return
        log.info("signal carried out", **shown, **result)
        hit("signal_posted")
        catalog.commands.finish(number, result)
        hit("signal_finished")

    def _execute(self, catalog: Catalog, number: int, signal: Signal) -> dict[str, Any]:
        """One backfill per table; raises ConfigError if there is not a single one that can be."""
        fields = _snapshot_fields(signal)
        if str(fields.get("surrogate-key") or "").strip():
            raise ConfigError(
                "'surrogate-key' is not supported: chunks are read and settled with the stream by the table's own key",
                remedy="leave it out",
            )
        entries = _text_list(fields, "data-collections")
        if not entries:
            raise ConfigError("'data-collections' is missing or empty: expected a list of names or regular expressions")
        filters = _filters(fields)
        if filters and signal.channel is Channel.MESSAGE:
            raise ConfigError(
                "a filter is SQL that is run with the reader's rights, and anybody who may connect can write a message",
                remedy="send it as a row of the table that 'snapshot.signals' names, or cdc backfill --where",
            )
        tables = self._tables()
        refused = {entry: "no table of the log matches" for entry in entries if not _tables_of_entry(entry, tables)}
        possible: dict[str, BackfillRequest] = {}
        for schema in _matching_tables(entries, tables):
            where = next((where for entry, where in filters if schema in _tables_of_entry(entry, tables)), None)
            request = BackfillRequest((exact_glob(schema.topic),), where=where)
            try:
                check_request(request, {schema.relation: schema}, {})
            except ConfigError as exc:
                refused[schema.topic] = exc.message
            else:
                possible[schema.topic] = request
        if not possible:
            raise ConfigError("; ".join(f"{name!r}: {why}" for name, why in refused.items()))
        return {"backfills": self._post(catalog, number, signal, possible), "refused": refused}

    def _post(
        self, catalog: Catalog, number: int, signal: Signal, requests: Mapping[str, BackfillRequest]
    ) -> list[int]:
        """Ask for those that were not asked for since the signal's own command; hands back all their numbers."""
        name, commands = self._definition.name, catalog.commands
        since = {json.dumps(c.payload, sort_keys=True): c.id for c in commands.ls(name, BACKFILL) if c.id > number}
        posted = []
        for topic, request in requests.items():
            payload = json.dumps(request.to_json(), sort_keys=True)
            job = since.get(payload) or commands.post(name, BACKFILL, request.to_json())
            if payload not in since:
                catalog.audit.write(_actor(signal), "backfill", name, {"id": job, "tables": [topic]})
            posted.append(job)
        return posted

    def _speak(self, catalog: Catalog, number: int, signal: Signal) -> dict[str, Any]:
        """Tell those on their way to rest, to go on or to end: all, but only backfills to end, and of those, if tables
        are named, the ones whose tables all are. A full copy that was cut off would leave a table half copied.
        """
        name, verb = self._definition.name, _VERBS[signal.type]
        entries = _text_list(_snapshot_fields(signal), "data-collections") if verb is BackfillAction.CANCEL else []
        tables = self._tables(with_signals=True)
        named = {schema.topic for schema in _matching_tables(entries, tables)}
        said = {c.payload.get("id") for c in catalog.commands.ls(name, verb.kind) if c.id > number}
        spoken_to, left = [], []
        for command in catalog.commands.pending(name, BACKFILL):
            request = BackfillRequest.from_json(command.payload)
            topics = {schema.topic for schema in tables if covers(request, schema.topic)}
            kept = verb is BackfillAction.CANCEL and request.resync
            if kept or (entries and not (topics and topics <= named)):
                left += [command.id] if kept or topics & named else []
                continue
            if command.id not in said:
                _send_action(catalog, name, command.id, verb, _actor(signal))
            spoken_to.append(command.id)
        return {"backfills": spoken_to, "left": left}

    def _tables(self, *, with_signals: bool = False) -> list[TableSchema]:
        """The tables of the log that are not gone, by topic; the one of signals is nothing that is read again."""
        own = None if with_signals else self._definition.snapshot.signals
        known = LogReader(self._definition.log.root).schemas().values()
        there = [s for s in known if s.state is not TableState.DROPPED and s.topic != own]
        return sorted(there, key=lambda schema: schema.topic)


def _send_action(catalog: Catalog, pipeline: str, job: int, verb: BackfillAction, actor: str) -> None:
    try:
        send_action(catalog, pipeline, job, verb, actor)
    except StateConflict:
        log.info("it had ended by then", backfill=job)


def _snapshot_fields(signal: Signal) -> dict[str, Any]:
    """What the signal says in detail; raises ConfigError unless it is about incremental snapshots."""
    fields = parse_json_object(signal.body) if signal.body.strip() else {}
    kind = str(fields.get("type") or "incremental").lower()
    if kind == "blocking":
        raise ConfigError(
            "a blocking snapshot stops the stream while it reads: rows are read beside the stream here",
            remedy="ask for type 'incremental', which gives the same rows, with a filter that is a condition",
        )
    if kind != "incremental":
        raise ConfigError(f"unknown type of snapshot {kind[:LOGGED_CHARACTERS]!r}: expected 'incremental'")
    return fields


def _text_list(fields: Mapping[str, Any], key: str) -> list[str]:
    found = fields.get(key) or []
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ConfigError(f"{key!r} is not a list of texts")
    return [text.strip() for text in found if text.strip()]


def _filters(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(names, condition): for a table the first one that means it holds. The older single condition means all."""
    single = fields.get("additional-condition")
    conditions = fields.get("additional-conditions") or []
    if isinstance(single, str) and single.strip():
        return [(".*", single)]
    if not isinstance(conditions, list):
        raise ConfigError("'additional-conditions' is not a list")
    found = []
    for condition in conditions:
        match condition:
            case {"data-collection": str(name), "filter": str(where)} if name.strip() and where.strip():
                found.append((name.strip(), where))
            case _:
                raise ConfigError("'additional-conditions' has an entry without 'data-collection' or 'filter'")
    return found


def _matching_tables(entries: Iterable[str], tables: list[TableSchema]) -> list[TableSchema]:
    """The tables that at least one entry means, in their order."""
    meant = {schema.topic for entry in entries for schema in _tables_of_entry(entry, tables)}
    return [schema for schema in tables if schema.topic in meant]


def _tables_of_entry(entry: str, tables: list[TableSchema]) -> list[TableSchema]:
    """The table of that very name, or else those whose `schema.table` the regular expression matches, as a whole and
    whatever its case. The expressions are RE2's: anybody can send one, and none takes longer than its text is long.
    """
    exact = [schema for schema in tables if (schema.schema, schema.name) == split_topic(entry)]
    if exact:
        return exact
    names = pa.array([f"{schema.schema}.{schema.name}" for schema in tables], pa.string())
    try:
        found = pc.match_substring_regex(names, rf"\A(?:{entry})\z", ignore_case=True).to_pylist()
    except pa.ArrowInvalid:
        raise ConfigError(f"{entry[:LOGGED_CHARACTERS]!r} is neither a table nor a regular expression of RE2") from None
    return [schema for schema, matches in zip(tables, found, strict=True) if matches]


def _actor(signal: Signal) -> str:
    return f"signal {signal.id[:LOGGED_CHARACTERS]}".strip()
