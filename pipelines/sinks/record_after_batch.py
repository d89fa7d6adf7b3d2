"""Record after a batch: computes the published record of a table after a batch or a failure, and the lag of a batch.

It also decides whether a batch has to be applied at all, and has the errors that several sinks raise for a batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from cdc.errors import RESYNC, CdcError, LogTrimmed, MissingBase, SchemaNotApplicable, complete_remedy
from cdc.position import Position
from cdc.table import TableSchema, TableState
from cdc.targets.published_record import TableRecord, TargetState
from pipelines.sinks.contract import TableBatch

WHOLE: Final = frozenset({TargetState.STREAMING, TargetState.CATCHING_UP})
"""States of a table whose position says whether it belongs to a cut."""


def check_captured(schema: TableSchema) -> None:
    """Raise SchemaNotApplicable if the state of the table says that some of its changes are not in the log.

    A dropped table passes: the log has all of its changes up to the drop.
    """
    if schema.state is TableState.NEEDS_RESYNC:
        raise SchemaNotApplicable(
            f"cannot apply changes of table {schema.topic!r}, because its state is {schema.state}: {schema.reason}",
            remedy=RESYNC,
        )


def dropped_record(record: TableRecord, schema: TableSchema, upto: int) -> TableRecord:
    """Return the final record of a dropped table.

    record: the record after the last batch of the table, in state FAILED if the target could not take the batch. The
    position becomes `upto`, because nothing waits for the table any longer.
    """
    reason = f"{schema.reason}; the target keeps the rows"
    if record.state == TargetState.FAILED:
        reason += f", without the last changes: {(record.reason or '').partition(' → ')[0]}"
    return replace(
        record,
        topic=schema.topic,
        position=max(record.position, upto),
        state=TargetState.DROPPED.value,
        reason=reason,
        schema=schema.to_json().decode(),
    )


def is_left_out(schema: TableSchema, schemas: Iterable[TableSchema]) -> bool:
    """Return True for a table of which no target is built: the definition no longer includes it, or it was dropped and
    another table has its name now.

    schemas: the present schemas of all tables in the log.
    """
    if schema.state is not TableState.DROPPED:
        return False
    names = {other.topic for other in schemas if other.state is not TableState.DROPPED}
    return schema.removed or schema.topic in names


def applied_state(batch: TableBatch, before: TableRecord | None, *, complete: bool) -> TargetState:
    """Return the state of a target after a batch was merged.

    before: the last published record of the table; None if it has none. complete: whether at least one full copy has
    ended in the target.
    """
    waits = before is not None and before.state == TargetState.SNAPSHOTTING and batch.generation is None
    return TargetState.STREAMING if complete and not waits and not batch.is_copying else TargetState.SNAPSHOTTING


def with_progress_state(record: TableRecord, upto: int) -> TableRecord:
    """Return the record with state STREAMING if its position is `upto`, otherwise CATCHING_UP.

    A record in any other state is returned unchanged. upto: the position of the cut.
    """
    return replace(record, state=_state_at(record.position, upto)) if record.state in WHOLE else record


def _state_at(position: int, upto: int) -> str:
    return (TargetState.STREAMING if position == upto else TargetState.CATCHING_UP).value


def at_cut(record: TableRecord, upto: int) -> TableRecord:
    """Return the record of a table that has no changes up to `upto`, the position of the cut."""
    position = max(record.position, upto)
    return record.at(position, _state_at(position, upto) if record.state in WHOLE else record.state)


def log_trimmed_error(exc: LogTrimmed, sink: str) -> LogTrimmed:
    """Return LogTrimmed with the remedy to rebuild the sink, because changes that the sink needs were trimmed."""
    return LogTrimmed(exc.message, remedy=f"rebuild the sink: 'cdc replay {sink}'")


def failure_reason(exc: CdcError) -> str:
    """Return code, message and remedy of an error as one line of text."""
    return f"{exc.code} {exc.message} → {exc.fix}"


def failed_record(before: TableRecord | None, schema: TableSchema, exc: CdcError) -> TableRecord:
    """Return the record of a table that failed: it keeps the position of `before`, and the reason describes `exc`."""
    target, position, version = (before.target, before.position, before.version) if before else ("", 0, None)
    return TableRecord(
        relation=schema.relation,
        topic=schema.topic,
        target=target,
        position=position,
        version=version,
        state=TargetState.FAILED.value,
        reason=complete_remedy(failure_reason(exc), topic=schema.topic),
        schema=before.schema if before else schema.to_json().decode(),
        parked=before.parked if before else (),
        merged=before.merged if before else None,
    )


def lag_since(committed_at: float | None) -> float | None:
    """Return the seconds since a commit time in µs since 1970 UTC; None if there is none."""
    return None if committed_at is None else max(0.0, time.time() - committed_at / 1e6)


def is_done(current: TableRecord, batch: TableBatch) -> bool:
    """Return whether a batch must not change anything: it is published, or the table failed before it.

    current: the published record of the table.
    """
    has_failed = current.state == TargetState.FAILED and batch.after > current.position
    return has_failed or current.position >= batch.upto


def missing_base(schema: TableSchema, position: int) -> MissingBase:
    """Return the error of a partial image at a position whose base row the target does not have."""
    return MissingBase(
        f"the target of table {schema.topic!r} has no base row for a partial image at {Position(position)}"
    )


def key_required(schema: TableSchema) -> SchemaNotApplicable:
    """Return the error of a table without a key, whose rows cannot be documents of a search index."""
    return SchemaNotApplicable(
        f"table {schema.topic!r} has no key and cannot be indexed",
        remedy="add a primary key to the table, or exclude it from the sink's tables",
    )
