"""A Delta sink's record under the rules of now: tables stop whose targets were made under others, before any change."""

from __future__ import annotations

from dataclasses import replace

from cdc.errors import TargetRulesChanged, TargetUnusable
from cdc.naming import parked_uri
from cdc.remedy import complete_remedy
from cdc.stores.published import Published, TableRecord, TargetState
from cdc.stores.target_rules import TargetRules
from cdc.table import TableSchema, TableState
from pipelines.sinks.delta.dead_letters import DeadLetterTable
from pipelines.sinks.delta.erasure import erase_earlier, is_marked
from pipelines.sinks.delta.published import PublishedTable
from pipelines.sinks.delta.shared import part_of
from pipelines.sinks.delta.table import DeltaTarget
from pipelines.sinks.table_state import placed, reason


def opened(uri: str, relation: int) -> DeltaTarget | None:
    """What one table has there."""
    whole = DeltaTarget.open(uri)
    return whole and part_of(whole, relation)


def follow_rules(published: PublishedTable, uri: str, record: Published, rules: TargetRules) -> Published:
    """The record with the states that the rules mean, published if they are others; uri: of the published record.

    A table that stopped for its rules goes on once they are back. What a replay that was killed had still to erase
    is erased.
    """
    erased = {one.target for one in record.tables.values() if _is_to_erase(one, rules)}
    tables = {r: _at_newest(one, record.position) if one.target in erased else one for r, one in record.tables.items()}
    ruled = replace(record, tables={r: _under(one, rules, record.position) for r, one in tables.items()})
    if erased or ruled != record:
        published.write(ruled, erased)
    for target in erased:
        erase_earlier(target, ruled.versions[target])
    if erased:
        DeadLetterTable(parked_uri(uri)).rewrite(ruled)
    return ruled


def _under(record: TableRecord, rules: TargetRules, position: int) -> TableRecord:
    stopped = record.state == TargetState.FAILED
    by_rules = stopped and (record.reason or "").startswith(TargetRulesChanged.code)
    if not record.target or (stopped and not by_rules):
        return record
    try:
        target = DeltaTarget.open(record.target)
    except TargetUnusable:
        return record  # the next batch says so
    schema = None if record.schema is None else TableSchema.from_json(record.schema)
    if target is None or (found := rules.difference(target.table, record.topic, schema)) is None:
        return _going_on(record, target, schema, position) if by_rules else record
    stops = complete_remedy(reason(found), topic=record.topic)
    return replace(record, state=TargetState.FAILED.value, reason=stops)


def _going_on(
    record: TableRecord, target: DeltaTarget | None, schema: TableSchema | None, position: int
) -> TableRecord:
    """A table that stopped for rules that are back."""
    copying = schema is not None and schema.state is TableState.SNAPSHOTTING
    whole = target is not None and part_of(target, record.relation).complete and not copying
    state = TargetState.CATCHING_UP if whole else TargetState.SNAPSHOTTING
    return placed(replace(record, state=state.value, reason=None), position)


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
    """The record of a target that was replaced and not published."""
    target = opened(record.target, record.relation)
    if target is None:
        return record
    stands = max(record.position, target.applied or 0)
    return placed(replace(record, position=stands, version=target.version), position)
