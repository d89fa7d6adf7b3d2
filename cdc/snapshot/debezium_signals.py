"""The signal processor translates Debezium signals into backfill requests and actions.

`execute-snapshot` of type `incremental` becomes one backfill per table, so that each backfill has its own filter and
can be cancelled separately. `stop-`, `pause-` and `resume-snapshot` become actions on pending backfills, including
backfills that CLI or API requested.

For each signal, the processor stores a command of kind SIGNAL in the catalog, then the requests and actions, then the
result of the command. After a crash, it repeats the signals that have no result. It skips each request and action that
the catalog already has with a higher id than the SIGNAL command.
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
from cdc.snapshot.backfill_documents import BACKFILL, BackfillAction, BackfillRequest, check_request
from cdc.snapshot.backfill_status import covers
from cdc.snapshot.debezium_signal_queue import (
    CORRECT_SIGNAL,
    LOGGED_CHARACTERS,
    SIGNALS_LIMIT,
    Channel,
    Signal,
    SignalQueue,
    SignalType,
    parse_json_object,
)
from cdc.snapshot.reader_commands import send_action
from cdc.table import TableSchema, TableState, exact_glob, split_topic

SIGNAL: Final = "signal"
"""Kind of the command that records a signal and its result in the catalog."""
_VERBS: Final = {
    SignalType.STOP: BackfillAction.CANCEL,
    SignalType.PAUSE: BackfillAction.PAUSE,
    SignalType.RESUME: BackfillAction.RESUME,
}

log = structlog.get_logger("signals")


class Signals:
    """Processes the signals of one pipeline; the backfill worker uses it."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        settings = definition.snapshot
        self.queue = SignalQueue(definition.log.root, settings.signals, settings.signal_secret)
        """Queue of signals, which the decoding thread fills."""

    def pending(self) -> list[Signal]:
        """Return the signals whose transaction the log contains, in log order. Raises LogError.

        The method reads the log only if the queue contains a signal.
        """
        if not (waiting := self.queue.stored()):
            return []
        durable = LogReader(self._definition.log.root).durable or Position(0)
        return [signal for signal in waiting if signal.position <= durable]

    def process(self, catalog: Catalog) -> None:
        """Process the pending signals without querying the source.

        A refused signal is reported in a log message and in the result of its command. If access to the change log
        fails, the signals stay in the queue. Raises CatalogUnavailable.
        """
        try:
            for signal in self.pending():
                self._process(catalog, signal)
        except LogError as exc:
            log.warning(
                "cannot process signals, because access to the log failed; the reader tries again",
                code=exc.code,
                message=exc.message,
            )

    def _process(self, catalog: Catalog, signal: Signal) -> None:
        recorded = catalog.commands.ls(self._definition.name, SIGNAL, limit=SIGNALS_LIMIT)
        command = next((c for c in recorded if c.payload["key"] == signal.key), None)
        fields = {"id": signal.id, "type": signal.type.value, "channel": signal.channel.value}
        if command is None:
            payload = {"key": signal.key, "position": str(Position(signal.position)), **fields}
            number = catalog.commands.post(self._definition.name, SIGNAL, payload)
            hit("signal_noted")
        else:
            number = command.id
        if command is None or command.state is CommandState.PENDING:
            shown = fields | {"id": signal.id[:LOGGED_CHARACTERS]}
            self._finish(catalog, number, signal, shown)
        self.queue.remove(signal)

    def _finish(self, catalog: Catalog, number: int, signal: Signal, shown: Mapping[str, str]) -> None:
        carry_out = self._execute if signal.type is SignalType.EXECUTE else self._apply_action
        try:
            result = carry_out(catalog, number, signal)
        except ConfigError as exc:
            log.warning("refused a signal", **shown, code=exc.code, message=exc.message, fix=exc.fix)
            error = {"code": exc.code, "message": exc.message, "suggestion": exc.fix}
            catalog.commands.finish(number, {"error": error}, ok=False)
            return
        log.info("processed a signal", **shown, **result)
        hit("signal_posted")
        catalog.commands.finish(number, result)
        hit("signal_finished")

    def _execute(self, catalog: Catalog, number: int, signal: Signal) -> dict[str, Any]:
        """Store one backfill request per table; return the ids of the requests, and why other tables were refused.

        `number` is the id of the signal's command. Raises ConfigError if no table can be copied.
        """
        fields = _snapshot_fields(signal)
        if str(fields.get("surrogate-key") or "").strip():
            raise ConfigError(
                "the signal has 'surrogate-key', which is not supported: the table's own key orders the rows",
                remedy="send the signal again without 'surrogate-key'",
            )
        entries = _text_list(fields, "data-collections")
        if not entries:
            raise ConfigError(
                "'data-collections' of the signal is missing or empty: expected a list of names or regular expressions",
                remedy=CORRECT_SIGNAL,
            )
        filters = _filters(fields)
        if filters and signal.channel is Channel.MESSAGE:
            raise ConfigError(
                "a signal sent as a message may not have a filter: the filter runs with the reader's rights, "
                "and any role that knows the secret can send a message",
                remedy="insert the signal into the table that 'snapshot.signals' names, or run 'cdc backfill --where'",
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
            reasons = "; ".join(f"{name!r}: {why}" for name, why in refused.items())
            raise ConfigError(f"the signal starts no backfill: {reasons}", remedy=CORRECT_SIGNAL)
        return {"backfills": self._post(catalog, number, signal, possible), "refused": refused}

    def _post(
        self, catalog: Catalog, number: int, signal: Signal, requests: Mapping[str, BackfillRequest]
    ) -> list[int]:
        """Store one backfill request per topic, and return the ids of all requests.

        `number` is the id of the signal's command. A request that an earlier attempt stored is not stored again.
        """
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

    def _apply_action(self, catalog: Catalog, number: int, signal: Signal) -> dict[str, Any]:
        """Pause, resume or cancel pending backfills, as the signal requests.

        Returns the ids of these backfills, and the ids of those that a cancel signal left running. `number` is the id
        of the signal's command. A cancel signal with table names cancels a backfill only if it names all tables of the
        backfill. A cancel signal never cancels a full copy, because the table would stay incomplete.
        """
        name, verb = self._definition.name, _VERBS[signal.type]
        entries = _text_list(_snapshot_fields(signal), "data-collections") if verb is BackfillAction.CANCEL else []
        tables = self._tables(with_signals=True)
        named = {schema.topic for schema in _matching_tables(entries, tables)}
        posted = {c.payload.get("id") for c in catalog.commands.ls(name, verb.kind) if c.id > number}
        affected, left = [], []
        for command in catalog.commands.pending(name, BACKFILL):
            request = BackfillRequest.from_json(command.payload)
            topics = {schema.topic for schema in tables if covers(request, schema.topic)}
            kept = verb is BackfillAction.CANCEL and request.resync
            if kept or (entries and not (topics and topics <= named)):
                left += [command.id] if kept or topics & named else []
                continue
            if command.id not in posted:
                _send_action(catalog, name, command.id, verb, _actor(signal))
            affected.append(command.id)
        return {"backfills": affected, "left": left}

    def _tables(self, *, with_signals: bool = False) -> list[TableSchema]:
        """Return the tables of the log, sorted by topic, without dropped ones.

        The signal table is included only with `with_signals`.
        """
        own = None if with_signals else self._definition.snapshot.signals
        known = LogReader(self._definition.log.root).schemas().values()
        tables = [s for s in known if s.state is not TableState.DROPPED and s.topic != own]
        return sorted(tables, key=lambda schema: schema.topic)


def _send_action(catalog: Catalog, pipeline: str, job: int, verb: BackfillAction, actor: str) -> None:
    try:
        send_action(catalog, pipeline, job, verb, actor)
    except StateConflict:
        log.info("ignored a signal for a backfill that has already ended", backfill=job)


def _snapshot_fields(signal: Signal) -> dict[str, Any]:
    """Return the fields of the signal's body. Raises ConfigError if the field `type` is not `incremental`."""
    name = f"'data' of signal {signal.id[:LOGGED_CHARACTERS]!r}"
    fields = parse_json_object(signal.body, name) if signal.body.strip() else {}
    kind = str(fields.get("type") or "incremental").lower()
    if kind == "blocking":
        raise ConfigError(
            "a signal of type 'blocking' is not supported: such a snapshot would stop the stream while it reads",
            remedy="send the signal again with type 'incremental' and the same filter",
        )
    if kind != "incremental":
        raise ConfigError(
            f"the signal names an unknown type of snapshot {kind[:LOGGED_CHARACTERS]!r}: expected 'incremental'",
            remedy=CORRECT_SIGNAL,
        )
    return fields


def _text_list(fields: Mapping[str, Any], key: str) -> list[str]:
    found = fields.get(key) or []
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ConfigError(f"{key!r} of the signal is malformed: expected a list of texts", remedy=CORRECT_SIGNAL)
    return [text.strip() for text in found if text.strip()]


def _filters(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the filters of a signal, each as (table name or regular expression, condition).

    The first filter that matches a table applies to it. The older field `additional-condition` applies to all tables.
    """
    single = fields.get("additional-condition")
    conditions = fields.get("additional-conditions") or []
    if isinstance(single, str) and single.strip():
        return [(".*", single)]
    if not isinstance(conditions, list):
        raise ConfigError("'additional-conditions' of the signal is malformed: expected a list", remedy=CORRECT_SIGNAL)
    found = []
    for condition in conditions:
        match condition:
            case {"data-collection": str(name), "filter": str(where)} if name.strip() and where.strip():
                found.append((name.strip(), where))
            case _:
                raise ConfigError(
                    "'additional-conditions' of the signal has an entry without 'data-collection' or 'filter'",
                    remedy=CORRECT_SIGNAL,
                )
    return found


def _matching_tables(entries: Iterable[str], tables: list[TableSchema]) -> list[TableSchema]:
    """Return the tables that match at least one entry, in the order of `tables`."""
    topics = {schema.topic for entry in entries for schema in _tables_of_entry(entry, tables)}
    return [schema for schema in tables if schema.topic in topics]


def _tables_of_entry(entry: str, tables: list[TableSchema]) -> list[TableSchema]:
    """Return the table whose name is `entry`, or else all tables that match `entry` as a regular expression.

    The expression must match the whole text `schema.table`; case is ignored. RE2 matches in linear time, so an
    expression from an untrusted role cannot block the reader.
    """
    exact = [schema for schema in tables if (schema.schema, schema.name) == split_topic(entry)]
    if exact:
        return exact
    names = pa.array([f"{schema.schema}.{schema.name}" for schema in tables], pa.string())
    try:
        found = pc.match_substring_regex(names, rf"\A(?:{entry})\z", ignore_case=True).to_pylist()
    except pa.ArrowInvalid:
        raise ConfigError(
            f"'data-collections' contains {entry[:LOGGED_CHARACTERS]!r}, which is neither a table nor a regular "
            "expression of RE2",
            remedy=CORRECT_SIGNAL,
        ) from None
    return [schema for schema, matches in zip(tables, found, strict=True) if matches]


def _actor(signal: Signal) -> str:
    return f"signal {signal.id[:LOGGED_CHARACTERS]}".strip()
