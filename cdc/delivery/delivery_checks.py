"""Checks of the deliveries of a definition for `cdc doctor`: packages, destinations, topics, rules and registries.

Nothing is sent or created, and a delivery that runs is not disturbed. Whether a login has every right that sending
needs shows only when the delivery sends.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from cdc.config import Definition
from cdc.config.destinations import Delivery
from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.contract import ChecksAccess, DeliveryIdentity
from cdc.delivery.formats import check_registry
from cdc.delivery.outbox_route import OutboxRoute
from cdc.delivery.table_routes import TableRoute
from cdc.errors import CdcError, LogError, TransformFailed, complete_remedy
from cdc.log.reader import LogReader, read_file
from cdc.logical_message import MESSAGE_COLUMNS, message_prefixes
from cdc.position import Position
from cdc.postgres.preflight import PreflightProblem
from cdc.table import TableSchema, matches

AT_ONCE: Final = 16
"""Deliveries that are checked at the same time: a server that does not answer costs its timeout."""
ROWS_SEARCHED: Final = 1_000_000
"""Newest rows of the log, about, among which messages are searched."""
_NO_LOG: Final = "0" * 32


def delivery_problems(definition: Definition, tables: Sequence[TableSchema]) -> list[PreflightProblem]:
    """Return the problems of every delivery; those that only may be mistakes are not fatal. tables: captured ones."""
    log_id, prefixes = _logged(definition)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="deliveries") as pool:
        found = pool.map(
            # the columns of a view are known once it was computed
            lambda one: list(_problems(definition, one, () if one.views else tables, (log_id, prefixes))),
            definition.deliveries,
        )
        return [problem for problems in found for problem in problems]


def _problems(
    definition: Definition, settings: Delivery, tables: Sequence[TableSchema], logged: tuple[str, set[str] | None]
) -> Iterator[PreflightProblem]:
    subject, (log_id, prefixes) = f"delivery {settings.name}", logged
    topics: set[str] = set()
    for schema in tables:
        try:
            if (topic := _topic(definition, settings, schema)) is not None:
                topics.add(topic)
        except CdcError as exc:
            yield _problem(exc, subject, settings)
    topics |= {
        rule.topic.format(pipeline=definition.name, prefix=rule.prefix)
        for rule in settings.messages
        if "{prefix}" not in rule.topic or not set("*?[") & set(rule.prefix)
    }
    try:
        destination = new_destination(settings, DeliveryIdentity(definition.name, settings.name, log_id))
        if isinstance(destination, ChecksAccess):
            destination.check(topics)
    except CdcError as exc:
        yield _problem(exc, subject, settings)
    try:
        check_registry(settings)
    except CdcError as exc:
        yield _problem(exc, subject, settings)
    for message in (*_unmatched_tables(settings, tables), *_unmatched_messages(settings, prefixes)):
        yield PreflightProblem(TransformFailed.code, subject, message, fatal=False)


def _topic(definition: Definition, settings: Delivery, schema: TableSchema) -> str | None:
    """Return the topic of a table, if it has one that is known. Raises TransformFailed if its rule does not fit it, or
    if the events of deletes would have no topic, key or header.
    """
    if settings.outbox is not None and settings.outbox.table == schema.topic:
        OutboxRoute(schema, settings.outbox, definition.name)
        return None if "{type}" in settings.outbox.topic else settings.outbox.topic.format(pipeline=definition.name)
    if not settings.has_topics or not matches(schema.topic, settings.tables):
        return None
    route = TableRoute(schema, settings, definition.name)
    if route.unsent_by_deletes:
        names = ", ".join(map(repr, route.unsent_by_deletes))
        raise TransformFailed(
            f"topic, key or headers of the events of table {schema.topic!r} need columns that a delete does not "
            f"contain: {names}",
            remedy="run ALTER TABLE … REPLICA IDENTITY FULL at the source, name only columns of the key in the rule, "
            "or leave deletes out by 'when'",
        )
    return route.topic


def _unmatched_tables(settings: Delivery, tables: Sequence[TableSchema]) -> Iterator[str]:
    if not tables:
        return  # the source is reported elsewhere
    names = [schema.topic for schema in tables]
    own = [name for name in names if matches(name, settings.tables)]
    for glob in settings.tables:
        if not any(matches(name, (glob,)) for name in names):
            yield f"'tables': no captured table matches {glob!r}"
    if settings.outbox is not None and settings.outbox.table not in names:
        yield f"'outbox': table {settings.outbox.table!r} is not captured"
    for number, rule in enumerate(settings.rules):
        found = {name for name in own if matches(name, (rule.match,))}
        earlier = tuple(one.match for one in settings.rules[:number])
        if not found:
            yield f"'rules': no table of the delivery matches {rule.match!r}"
        elif all(matches(name, earlier) for name in found):
            yield f"'rules': an earlier rule applies to every table that {rule.match!r} matches"
    for glob in settings.counted_tables:
        if not any(matches(name, (glob,)) for name in own):
            yield f"'metrics': no table of the delivery matches {glob!r}"


def _unmatched_messages(settings: Delivery, prefixes: set[str] | None) -> Iterator[str]:
    for number, rule in enumerate(settings.messages):
        if any(fnmatch.fnmatchcase(rule.prefix, one.prefix) for one in settings.messages[:number]):
            yield f"'messages': an earlier entry applies to every prefix that {rule.prefix!r} matches"
        elif prefixes is not None and not any(fnmatch.fnmatchcase(one, rule.prefix) for one in prefixes):
            yield f"'messages': no recent message of the log has a prefix that matches {rule.prefix!r}"


def _logged(definition: Definition) -> tuple[str, set[str] | None]:
    """Return the id of the log, and the prefixes of its newest messages; None if no delivery sends messages.

    The checks of the log report if it cannot be read. Then the id is that of no log, or the prefixes are None.
    """
    try:
        log = LogReader(definition.log.root)
        log_id = log.log_id
    except LogError:
        return _NO_LOG, None
    return log_id, _newest_prefixes(log) if any(one.messages for one in definition.deliveries) else None


def _newest_prefixes(log: LogReader) -> set[str] | None:
    found: set[str] = set()
    try:
        durable, left = log.durable or Position(0), ROWS_SEARCHED
        for file in reversed(log.files(log.oldest, durable)):
            rows = read_file(file, log.oldest, durable, MESSAGE_COLUMNS)
            found |= set(message_prefixes(rows).drop_null().unique().to_pylist())
            left -= rows.num_rows
            if left <= 0:
                break
    except LogError:
        return None
    return found


def _problem(error: CdcError, subject: str, settings: Delivery) -> PreflightProblem:
    return PreflightProblem(error.code, subject, f"{error.message}; {complete_remedy(error.fix, sink=settings.name)}")
