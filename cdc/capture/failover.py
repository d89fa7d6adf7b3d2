"""Failover: continues the log on a promoted server that does not have the last transactions of the log.

The former primary sent transactions that the new one never received. Up to the switch point both servers have the same
WAL, so the log is right up to there, and every row of the log behind the switch point is wrong at the new primary.
Exactly these rows are read again, by their keys, or with their whole table if the keys do not say enough: after a
truncate or a new version of the table, without a key, or with too many keys. All other tables continue without a copy.

LSNs behind the switch point occur twice: in the log's last transactions, and in the new WAL. So the log continues in
the next epoch. One commit begins this epoch at the switch point, marks the tables, and names the new timeline. Before
this commit nothing has changed, and after it the ordinary start of the reader continues. So the step can be killed and
repeated at any time.

Each marked table gets its schema version at the switch point, because a lost transaction may have altered the table.
A table that the log knows only from lost transactions is marked as dropped, and targets delete its rows. If the new
primary has such a table all the same, the publication sync adds it again. The state `snapshotting` in the log requests
the copy. The catalog only limits it to keys, so without the catalog the whole table is copied.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from glob import escape
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import structlog

from cdc import metrics
from cdc.capture.commit_outside_stream import SnapshotCommit
from cdc.capture.resume_checks import (
    RECOVER,
    captured_oids,
    check_promotion,
    check_source,
    find_lost_transactions,
    lineage_of,
    lost_text,
)
from cdc.capture.settings import ReaderSettings, reader_settings
from cdc.capture.slot_belongs_to_log import check_not_overtaken
from cdc.catalog import Catalog
from cdc.config import Definition
from cdc.config.source import OnFailover
from cdc.errors import (
    CatalogUnavailable,
    LogTrimmed,
    SlotInUse,
    SourceCloned,
    SourceError,
    SourceRestored,
    TransactionsLost,
)
from cdc.failpoint import hit
from cdc.log.disk_format import CommitInfo
from cdc.log.reader import LogReader, read_file
from cdc.log.writer import LogWriter
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.slot import copy_lock
from cdc.postgres.source_state import SourceState, read_source_state
from cdc.postgres.timeline_history import TimelineSwitch
from cdc.snapshot.backfill_documents import BACKFILL, KEYS, BackfillRequest, Key
from cdc.table import TableSchema, TableState

GONE: Final = "only transactions that a promotion lost had captured the table"
"""Reason of a table in state DROPPED that the log did not capture before the switch point."""
_COLUMNS: Final = ("position", "relation", "op", "key", "old_key")
_ROW_OPERATIONS: Final = pa.array(["c", "u", "d", "r"])
log = structlog.get_logger("reader")


@dataclass(frozen=True, slots=True)
class LostTransactions:
    """The transactions of the log that the new primary never had."""

    transactions: int
    rows: dict[int, int]
    """Number of rows of the log by relation, with schema rows; messages have no relation and are not counted."""
    keys: dict[int, tuple[Key, ...]]
    """Keys of the rows of each relation whose rows can be read again by key."""


@dataclass(frozen=True, slots=True)
class FollowedPromotion:
    """What the log recorded about a promotion after which transactions of the log were lost."""

    timeline: int
    switch_point: Lsn
    before: Position
    """Position of the log before the promotion was recorded."""
    position: Position
    """First position of the new epoch."""
    transactions: int
    """Number of lost transactions."""
    tables: dict[str, int]
    """Number of lost rows by table; these rows or tables are read again, or the tables need a resync."""
    keys: dict[str, tuple[Key, ...]]
    """Key list of each table of which only these keys are read again."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; positions are text."""
        return {
            "timeline": self.timeline,
            "switch_point": str(self.switch_point),
            "before": str(self.before),
            "position": str(self.position),
            "lost_transactions": self.transactions,
            "lost_tables": self.tables,
            "keys": {topic: len(keys) for topic, keys in self.keys.items()},
        }


def follow_promotion(definition: Definition, *, accepted: bool = False) -> FollowedPromotion | None:
    """Begin the next epoch at the switch point, and have the rows of the lost transactions read again.

    Returns None, and changes nothing, if no transaction of the log is lost.

    accepted: True if an operator has confirmed that the source is the new primary.

    Raises TransactionsLost if the policy is to stop, or if the log no longer has every lost change. Raises SlotInUse
    while another process uses the slot, and the errors of the resume checks if continuing could lose changes.
    """
    promotion = _record_promotion(reader_settings(definition), accepted=accepted)
    if promotion is not None:
        _request_keys(promotion, definition)
    return promotion


def _record_promotion(settings: ReaderSettings, *, accepted: bool) -> FollowedPromotion | None:
    source, writer = settings.source, LogWriter(settings.log, settings.limits)
    view, last = LogReader(settings.log), writer.last_commit
    if last is None:
        return None
    with connect(source.dsn, application_name="cdc failover") as conn, copy_lock(conn, source.slot):
        state = read_source_state(source.dsn, source.slot, source.publication, captured_oids(view.schemas()))
        try:
            lost_from = find_lost_transactions(view.identity, last, state)
            if lost_from is None:
                return None
            check_promotion(last, state, lost_from, accepted=accepted)
        except SourceError as exc:
            check_not_overtaken(settings.log, last, exc)
            raise
        if state.slot is not None and state.slot.active:
            raise SlotInUse(f"slot {state.slot.name!r} is in use by pid {state.slot.active_pid}")
        text = lost_text(last, state, lost_from)
        if source.on_failover is OnFailover.STOP and not accepted:
            raise TransactionsLost(text)
        lost = lost_transactions(view, last, lost_from, text)
        tables = list(_tables_at_switch(view, last, lost_from, lost, _state_of_tables(settings, state, lost_from)))
        position = Position.of(lost_from.switch_point - 1, last.last.epoch + 1)
        commit = SnapshotCommit(writer, position)
        for schema in tables:
            commit.mark(schema, ended=schema.state is TableState.DROPPED)
        hit("before_promotion_recorded")
        commit.commit(lineage_of(state))
        hit("after_promotion_recorded")
    return FollowedPromotion(
        timeline=state.identity.timeline,
        switch_point=lost_from.switch_point,
        before=last.last,
        position=position,
        transactions=lost.transactions,
        tables={schema.topic: lost.rows[schema.relation] for schema in tables},
        keys=_keys_of_complete_tables(view, _last_common(last, lost_from), lost, tables),
    )


def _keys_of_complete_tables(
    view: LogReader, common: Position, lost: LostTransactions, marked: list[TableSchema]
) -> dict[str, tuple[Key, ...]]:
    """Return the key lists of the marked tables that were complete at the switch point; other tables need a copy."""
    then = view.schemas(common)
    return {
        schema.topic: lost.keys[schema.relation]
        for schema in marked
        if schema.state is TableState.SNAPSHOTTING
        and schema.key
        and then[schema.relation].state is TableState.LIVE
        and schema.relation in lost.keys
    }


def _request_keys(promotion: FollowedPromotion, definition: Definition) -> None:
    """Request a backfill of the keys of each table; without the catalog the reader copies whole tables instead."""
    try:
        with Catalog.open(definition.catalog.url) as catalog:
            for topic, keys in promotion.keys.items():
                request = BackfillRequest((escape(topic),), epoch=promotion.position.epoch, keys=keys, completes=True)
                catalog.commands.post(definition.name, BACKFILL, request.to_json())
    except CatalogUnavailable as exc:
        log.warning("cannot request the lost keys, so whole tables are copied", code=exc.code, message=exc.message)


def accept_promotion(definition: Definition) -> FollowedPromotion | None:
    """Follow a promotion because an operator has confirmed that the source is the new primary; see `follow_promotion`.

    Raises LogError if there is no log.
    """
    LogReader(definition.log.root)  # opening the log for writing would create it
    return follow_promotion(definition, accepted=True)


def check_succession(definition: Definition) -> None:
    """Raise an error unless the source, which has the system identifier of the log, has all transactions of the log.

    For a server that does not have them, the error says how many rows of the log have to be read again, by table.
    """
    view, source = LogReader(definition.log.root), definition.source
    last = view.last_commit
    assert last is not None, "the caller has checked that the log is not empty"  # noqa: S101
    oids = captured_oids(view.schemas())
    state = read_source_state(source.current_dsn(), source.slot.name, source.publication.name, oids)
    try:
        check_source(view.identity, last, state)
    except (TransactionsLost, SourceRestored, SourceCloned) as exc:
        lost_from = find_lost_transactions(view.identity, last, state)
        if lost_from is None:
            raise
        schemas, lost = view.schemas(), lost_transactions(view, last, lost_from, exc.message)
        rows = sorted((schemas[relation].topic, count) for relation, count in lost.rows.items())
        listed = ", ".join(f"{topic} ({count:,} rows of the log)" for topic, count in rows) or "no table"
        raise type(exc)(f"{exc.message}; rows that have to be read again: {listed}", remedy=exc.remedy) from exc


def report_promotion(promotion: FollowedPromotion, pipeline: str, process_metrics: metrics.Metrics) -> None:
    """Write the log message and the metrics of a promotion that lost transactions."""
    process_metrics.add(metrics.LOST_TRANSACTIONS, promotion.transactions, pipeline)
    log.warning(
        "the promoted server does not have the last transactions of the log; a new epoch begins at the switch point, "
        "and the rows or tables of these transactions are read again or marked as needs_resync",
        timeline=promotion.timeline,
        switch_point=str(promotion.switch_point),
        lost_transactions=promotion.transactions,
        log_was_at=str(promotion.before),
        position=str(promotion.position),
        tables=sorted(promotion.tables),
        keys={topic: len(keys) for topic, keys in promotion.keys.items()},
    )


def lost_transactions(view: LogReader, last: CommitInfo, lost_from: TimelineSwitch, text: str) -> LostTransactions:
    """Count the rows of the log behind the switch point; raise TransactionsLost if single changes were trimmed."""
    after = _last_common(last, lost_from)
    try:
        files = view.history(after, last.last).changes
    except LogTrimmed as exc:
        raise TransactionsLost(f"{text}; the log no longer has all of these changes", remedy=RECOVER) from exc
    rows = Counter[int]()
    positions = set[int]()
    keys = defaultdict[int, set[Key]](set)
    unkeyed = set[int]()
    for file in files:
        changes = read_file(file, after, last.last, _COLUMNS)
        positions.update(changes["position"].unique().to_pylist())
        for count in pc.value_counts(changes["relation"].drop_null()).to_pylist():
            rows[count["values"]] += count["counts"]
        has_key = pc.and_(pc.is_in(changes["op"], _ROW_OPERATIONS), pc.is_valid(changes["key"]))
        unkeyed |= set(changes["relation"].filter(pc.invert(has_key)).drop_null().unique().to_pylist())
        unkeyed |= {relation for relation, count in rows.items() if count > KEYS}
        keyed = changes.filter(
            pc.and_(has_key, pc.invert(pc.is_in(changes["relation"], pa.array(unkeyed, pa.int64()))))
        )
        for row in keyed.select(["relation", "key", "old_key"]).to_pylist():
            keys[row["relation"]] |= {tuple(key) for key in (row["key"], row["old_key"]) if key is not None}
    listed = {relation: tuple(sorted(own)) for relation, own in keys.items() if _is_listable(own)}
    return LostTransactions(
        len(positions), dict(rows), {relation: listed[relation] for relation in listed.keys() - unkeyed}
    )


def _is_listable(keys: set[Key]) -> bool:
    """Return True if one request can contain all keys, and no key contains a null value."""
    return len(keys) <= KEYS and all(None not in key for key in keys)


def _state_of_tables(settings: ReaderSettings, state: SourceState, lost_from: TimelineSwitch) -> tuple[TableState, str]:
    """Return the state and the reason that a table of the lost transactions gets."""
    copies = settings.source.on_failover is not OnFailover.CONTINUE and settings.source.copies_rows
    reason = (
        f"the promotion to timeline {state.identity.timeline} at {lost_from.switch_point} lost transactions that "
        "changed the table"
    )
    return TableState.SNAPSHOTTING if copies else TableState.NEEDS_RESYNC, reason


def _tables_at_switch(
    view: LogReader,
    last: CommitInfo,
    lost_from: TimelineSwitch,
    lost: LostTransactions,
    mark: tuple[TableState, str],
) -> Iterator[TableSchema]:
    """Yield the tables of the lost transactions with their schema versions at the switch point and the marked state."""
    common = _last_common(last, lost_from)
    then, now = view.schemas(common), view.schemas()
    for relation in sorted(lost.rows):
        before = then.get(relation)
        if before is None or before.state is TableState.DROPPED:
            yield (before or now[relation]).flagged(TableState.DROPPED, GONE)
        else:
            yield before.flagged(*mark)


def _last_common(last: CommitInfo, lost_from: TimelineSwitch) -> Position:
    """Return the last position at which the log's transactions are those of the new primary too."""
    return Position.of(lost_from.switch_point - 1, last.last.epoch)
