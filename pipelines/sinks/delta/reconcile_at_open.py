"""Reconciliation: compares a Delta sink's published record with its targets and rules when a driver opens the sink.

After a crash a target may contain changes beyond the published record. If a rule changed, tables whose targets were
written under the old rule are stopped before any row changes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import structlog

from cdc.errors import TargetRulesChanged, TargetUnusable, complete_remedy
from cdc.position import Position
from cdc.table import TableSchema, TableState
from cdc.target_names import parked_uri
from cdc.targets.path_ownership import LOG_ID
from cdc.targets.published_record import Published, TableRecord, TargetState
from cdc.targets.target_rule_changes import TargetRules
from pipelines.sinks.contract import SchemasAt
from pipelines.sinks.delta.dead_letters import DeadLetterTable
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.erase_earlier_versions import erase_earlier, is_marked
from pipelines.sinks.delta.open_targets import OpenTargets
from pipelines.sinks.delta.published_cuts_table import PublishedTable
from pipelines.sinks.record_after_batch import failure_reason, with_progress_state

log = structlog.get_logger("apply")


def open_part(uri: str, relation: int) -> DeltaTarget | None:
    """Open the target at uri, limited to one relation if it is shared; return None if uri has no Delta table."""
    whole = DeltaTarget.open(uri)
    return whole and whole.part_of(relation)


def with_target_position(record: TableRecord, cut: int) -> TableRecord:
    """Return the record of a table; if its target is ahead, set position and version to those of the target.

    cut: position of the published record. If the target cannot be opened, the returned record has state FAILED.
    """
    try:
        target = None if record.state == TargetState.FAILED else open_part(record.target, record.relation)
        applied = 0 if target is None else target.applied or 0
    except TargetUnusable as exc:
        return _failed(record, exc)
    if target is None or applied <= record.position:
        return record
    return with_progress_state(replace(record, position=applied, version=target.version), cut)


def go_back(published: PublishedTable, record: Published, schemas_at: SchemasAt) -> Published:
    """Take each table whose target is older than the published record back to the position of its target.

    Such a target was restored from a copy, or its last commits were lost. Its changes are merged again from its own
    `txn`. The target first skips the versions that it had before: kept cuts and views name these versions, and must
    not find other rows in them. The new record is published before, so that the versions are skipped after a crash too.
    Returns the new record. schemas_at: as in Sink.open.
    """
    older = dict[int, TableRecord]()
    for relation, table in record.tables.items():
        with suppress(TargetUnusable):  # `with_target_position` records the error
            target = None if table.version is None else open_part(table.target, relation)
            if target is not None and _is_older(target, table, record, published.log_id):
                older[relation] = _at_target(table, target, record, schemas_at)
    if not older:
        return record
    back = replace(record, tables={**record.tables, **older})
    published.write(back)
    tables = dict(back.tables)
    for uri, version in {table.target: table.version for table in older.values()}.items():
        try:
            target = DeltaTarget.open(uri)
            if target is not None and version is not None:
                target.skip_to(version)
        except TargetUnusable as exc:
            failed = {r: _failed(table, exc) for r, table in tables.items() if table.target == uri}
            tables |= failed
    return replace(back, tables=tables)


def _failed(record: TableRecord, exc: TargetUnusable) -> TableRecord:
    reason = complete_remedy(failure_reason(exc), topic=record.topic)
    return replace(record, state=TargetState.FAILED.value, reason=reason)


def _is_older(target: DeltaTarget, record: TableRecord, cut: Published, log_id: str) -> bool:
    """Return whether the target of this table, written from this log, is older than the published cut."""
    if target.read_property(LOG_ID) != log_id or target.relation != record.relation:
        return False  # the next batch of the table raises an error
    return target.version < cut.versions[record.target] or (target.applied or 0) < (record.merged or 0)


def _at_target(record: TableRecord, target: DeltaTarget, cut: Published, schemas_at: SchemasAt) -> TableRecord:
    """Return the record of a table at the position of its older target."""
    applied, version = target.applied or 0, cut.versions[record.target]
    log.warning(
        "a target is older than the published cut; its changes are merged again from the log",
        table=record.topic,
        target=record.target,
        version=target.version,
        published_version=version,
        after=str(Position(applied)),
    )
    schema = schemas_at(applied).get(record.relation)
    state = TargetState.CATCHING_UP if target.is_complete else TargetState.SNAPSHOTTING
    return replace(
        record,
        position=min(applied, record.position),
        version=max(version, target.version) + 1,
        merged=target.applied,
        state=record.state if record.state == TargetState.FAILED else state.value,
        schema=record.schema if schema is None else schema.to_json().decode(),
    )


def parked_upto(record: TableRecord, *, keeps_history: bool) -> int:
    """Return the position up to which entries of parked rows are valid.

    With history this is the position up to which the target has all changes, otherwise the position of the record.
    """
    try:
        target = DeltaTarget.open(record.target) if keeps_history and record.target else None
        return record.position if target is None else max(record.position, target.changed_upto)
    except TargetUnusable:
        return record.position  # the next batch raises the error


def readable_versions(record: Published, targets: OpenTargets) -> dict[str, int]:
    """Return URI → version that readers of the published cut should read, for each target.

    This is usually the newest version, because it includes commits of other clients. It is the published version if the
    target already has changes after the cut.
    """
    return {uri: _readable_version(uri, version, record, targets) for uri, version in record.versions.items()}


def _readable_version(uri: str, published: int, record: Published, targets: OpenTargets) -> int:
    tables = [t for t in record.tables.values() if t.target == uri and t.state != TargetState.FAILED]
    try:
        target = DeltaTarget.open(uri) if tables else None
        if target is None or any(_is_ahead(target.part_of(t.relation), t, targets) for t in tables):
            return published
    except TargetUnusable:
        return published  # the next batch of the table raises the error
    return target.version


def _is_ahead(target: DeltaTarget, record: TableRecord, targets: OpenTargets) -> bool:
    return max(target.applied or 0, targets.erased_upto(target, record.relation)) > record.position


def follow_rules(published: PublishedTable, uri: str, record: Published, rules: TargetRules) -> Published:
    """Stop or continue each table as the rules require, and return the new record; publish it if it changed.

    A table that stopped because of its rules continues once the old rules are restored. If a replay was killed before
    it erased values that the rules hide, this function erases them. uri: directory of the published record.
    """
    erased = {one.target for one in record.tables.values() if _is_to_erase(one, rules)}
    tables = {r: _at_newest(one, record.position) if one.target in erased else one for r, one in record.tables.items()}
    ruled = replace(record, tables={r: _by_rules(one, rules, record.position) for r, one in tables.items()})
    if erased or ruled != record:
        published.write(ruled, erased)
    for target in erased:
        erase_earlier(target, ruled.versions[target])
    if erased:
        DeadLetterTable(parked_uri(uri)).rewrite(ruled)
    return ruled


def _by_rules(record: TableRecord, rules: TargetRules, position: int) -> TableRecord:
    stopped = record.state == TargetState.FAILED
    stopped_by_rules = stopped and (record.reason or "").startswith(TargetRulesChanged.code)
    if not record.target or (stopped and not stopped_by_rules):
        return record
    try:
        target = DeltaTarget.open(record.target)
    except TargetUnusable:
        return record  # the next batch raises the error
    schema = None if record.schema is None else TableSchema.from_json(record.schema)
    if target is None or (found := rules.difference(target.table, record.topic, schema)) is None:
        return _continued(record, target, schema, position) if stopped_by_rules else record
    reason = complete_remedy(failure_reason(found), topic=record.topic)
    return replace(record, state=TargetState.FAILED.value, reason=reason)


def _continued(
    record: TableRecord, target: DeltaTarget | None, schema: TableSchema | None, position: int
) -> TableRecord:
    """Return the record of a table that stopped after a change of its rules and continues under the old rules."""
    copying = schema is not None and schema.state is TableState.SNAPSHOTTING
    whole = target is not None and target.part_of(record.relation).is_complete and not copying
    state = TargetState.CATCHING_UP if whole else TargetState.SNAPSHOTTING
    return with_progress_state(replace(record, state=state.value, reason=None), position)


def _is_to_erase(record: TableRecord, rules: TargetRules) -> bool:
    try:
        target = DeltaTarget.open(record.target) if record.version is not None else None
    except TargetUnusable:
        return False
    if target is None or not is_marked(target.table):
        return False
    schema = None if record.schema is None else TableSchema.from_json(record.schema)
    return rules.exposes(target.table, record.topic, schema) is None


def _at_newest(record: TableRecord, position: int) -> TableRecord:
    """Return the record with the newest version of its target, which a killed replay may have left unpublished."""
    target = open_part(record.target, record.relation)
    if target is None:
        return record
    applied = max(record.position, target.applied or 0)
    return with_progress_state(replace(record, position=applied, version=target.version), position)
