"""DeltaSink: one Delta table per source table, merged by position, and one published record beside them.

Order inside `apply`: read the bases of partial images, follow the schema, erase what truncates and
generations ended, merge. Only the last carries the `txn`: the merge, or the erasure where there is nothing to merge;
everything before it can be done again.
Honest ceiling: effectively once. Two drivers at a time are refused at `publish`; between two
publishes on a store where Spark cannot fence (local, S3) that there is one rests on the lease.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from threading import RLock
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from cdc.config import DeadLetterSettings, SchemaChanges, SinkRule, TableSettings, rule_of, table_settings
from cdc.config.sinks import HistoryMode
from cdc.config.target_path import target_path
from cdc.errors import TargetUnusable
from cdc.failpoint import hit
from cdc.naming import column_name, parked_uri, published_uri
from cdc.stores.dead_letter_rows import Image
from cdc.stores.target_rules import TargetRules
from cdc.table import Column, TableSchema
from pipelines.runtime.external_commits import ExternalCommitReport
from pipelines.runtime.throttle import CommitRate
from pipelines.sinks.contract import NONE_PARKED, Published, RefusedRow, TableBatch, TableRecord, TargetState
from pipelines.sinks.delta.base_lookup import BaseLookup, frame_source, table_source
from pipelines.sinks.delta.column_defaults import default_expression
from pipelines.sinks.delta.columns import check_kept, check_named, selected
from pipelines.sinks.delta.dead_letters import DeadLetterTable, refused, refused_changes
from pipelines.sinks.delta.external_commits import ExternalCommitWatch
from pipelines.sinks.delta.file_statistics import DataFile, TargetFolder
from pipelines.sinks.delta.history import (
    HistoryTarget,
    all_columns,
    changed_upto,
    first_columns,
    note_before,
    note_older,
    refill,
    since_copied,
)
from pipelines.sinks.delta.keyless_merge import counted_source
from pipelines.sinks.delta.maintenance import TargetMaintenance, UpkeepSettings
from pipelines.sinks.delta.merge import ERASED, ONE_SPARK_WRITE, OP, ROWS, TxnMarker, merge_with_spark
from pipelines.sinks.delta.merge_source import RowShape
from pipelines.sinks.delta.partition_values import check_parts
from pipelines.sinks.delta.published import PublishedTable
from pipelines.sinks.delta.rule_check import follow_rules, opened
from pipelines.sinks.delta.schema_evolution import check_left_out, dropped, held_as, held_before, only_in
from pipelines.sinks.delta.shared import SharedTarget, part_of
from pipelines.sinks.delta.table import COLUMNS, DeltaTarget
from pipelines.sinks.delta.table_features import asking
from pipelines.sinks.delta.table_layout import TableLayout
from pipelines.sinks.delta.table_plan import TablePlans
from pipelines.sinks.delta.writer_choice import rewritten
from pipelines.sinks.delta.writers import Writer as Writer  # noqa: PLC0414 - a setting
from pipelines.sinks.delta.writers import Writers
from pipelines.sinks.table_state import applied_state, placed, reason
from pipelines.transform.expressions import refusing
from pipelines.types import ColumnPolicies, Policy, TypePolicy

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ATTEMPTS: Final = 5
_PARALLEL: Final = 4
"""Tables merged at once by delta-rs, which works outside of the interpreter's lock; more only take memory."""


@dataclass(frozen=True, slots=True)
class DeltaSettings:
    """What a definition says of a Delta sink."""

    name: str
    path: str
    """Template with `{schema}` and `{table}`."""
    writer: Writer = Writer.AUTO
    table: TableSettings = field(default_factory=TableSettings)
    """How a table is kept that no rule matches."""
    rules: tuple[SinkRule, ...] = ()
    record: str | None = None
    """Directory of the published record; None: `_cdc/published` beside the targets."""
    upkeep: UpkeepSettings = field(default_factory=UpkeepSettings)
    """How long cuts are kept, and when what nobody needs is removed."""
    max_rewrite: int = 0
    """Bytes of one table written again per second, above which batches wait; 0: no bound."""

    _known: dict[str, TableSettings] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By topic; asked for many times with every batch."""

    def of(self, topic: str) -> TableSettings:
        """How one table is kept."""
        if topic not in self._known:
            self._known[topic] = table_settings(topic, self.table, self.rules)
        return self._known[topic]

    def types_of(self, topic: str) -> Policy:
        """How the values of one table become columns."""
        settings = self.of(topic)
        columns = tuple((name, TypePolicy(policy)) for name, policy in settings.columns.items())
        return ColumnPolicies(TypePolicy(settings.types), columns) if columns else TypePolicy(settings.types)

    def uri_of(self, schema: TableSchema) -> str:
        """Where the target of one table lies."""
        return target_path(self.path, self.rules, schema)

    def __post_init__(self) -> None:
        # a definition's values are equal texts of its own enums
        object.__setattr__(self, "writer", Writer(self.writer))


class DeltaSink:
    """The contract is pipelines.sinks.contract.Sink."""

    parallel = _PARALLEL

    def __init__(self, settings: DeltaSettings, spark: SparkSession | None = None) -> None:
        self.name = settings.name
        self._settings = settings
        self._writers = Writers(settings.writer, settings.path)
        self._shapes = TablePlans(settings.rules)
        self._rules = TargetRules(settings.table, settings.rules)
        self._log_id = ""
        self._published: PublishedTable | None = None
        self._position = 0
        self._records: dict[int, TableRecord] = {}
        """As published, never as applied: they say where a range began, also when it is tried again."""
        self._versions: dict[str, int] = {}
        """Of the targets, as published."""
        self._targets: dict[str, DeltaTarget] = {}
        self._writing: dict[str, RLock] = {}
        self._erased: dict[int, int] = {}
        """By target: tables that share one are merged one after the other."""
        self._upkeep = TargetMaintenance(settings.upkeep)
        self.pace = CommitRate(settings.max_rewrite)
        self.foreign = ExternalCommitReport()
        self._watch = ExternalCommitWatch(self.foreign)
        self._record_uri = settings.record or published_uri(settings.path)
        self.parked = DeadLetterTable(parked_uri(self._record_uri))
        if spark is not None:
            self.attach(spark)

    def shape(self, schema: TableSchema) -> RowShape:
        """What the rows of a table's target look like; raises as Shapes.of and selected."""
        kept = selected(schema, self._settings.of(schema.topic))
        return self._shapes.of(kept, self._settings.types_of(schema.topic))

    def attach(self, spark: SparkSession) -> None:
        """See Sink.attach; from now on Spark writes what is large, if it has Delta."""
        self._shapes.spark = spark
        self._writers.attach(spark)

    def open(self, log_id: str) -> Published | None:
        """See Sink.open; raises DeltaJarMissing when the writer is Spark and it has no Delta."""
        self._writers.check(self.name)
        self._log_id = log_id
        self._published = PublishedTable.open(self._record_uri, log_id, self._settings.upkeep.retain)
        record = self._published.record()
        if record is None:
            self.parked.take_up(Published(0, 0), {})
            return None
        record = follow_rules(self._published, self._record_uri, record, self._rules)
        self._remember(record)
        tables = {r: self._standing(table) for r, table in record.tables.items()}
        self.parked.take_up(record, {r: self._parked_upto(table) for r, table in tables.items()})
        return replace(record, tables=tables)

    def parks(self, schema: TableSchema) -> DeadLetterSettings:
        """See Parks.parks: a table without a key stops instead.

        So does one with a function of whose rows nobody knows what they hide: a parked row is one from before it.
        """
        kept, rule = self._settings.of(schema.topic), rule_of(schema.topic, self._settings.rules)
        hides = rule is not None and rule.transform is not None and rule.transform.python is not None
        return NONE_PARKED if hides or not schema.key else kept.dead_letters

    def beside(self, schema: TableSchema) -> Callable[[Image], Image]:
        """See Parks.beside."""
        return self.shape(schema).beside

    def keeps_changes(self, schema: TableSchema) -> bool:
        """See Parks.keeps_changes."""
        return self._settings.of(schema.topic).keeping is not HistoryMode.LATEST

    def stands(self, schema: TableSchema) -> int:
        """See Parks.stands."""
        with self._alone(schema):
            stands = self._has_upto(self._target(schema), schema.topic)
        self.parked.take_up_unlisted(schema.relation, stands)
        return stands

    def refused(self, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """See Parks.refused."""
        with self._alone(batch.schema), asking(self._settings.uri_of(batch.schema)):
            target = self._target(batch.schema)
            if self.keeps_changes(batch.schema):
                return refused_changes(batch, self.shape(self._as_held(target, batch).schema), limit)
            if batch.rows is None:
                return []
            before = replace(self._before(target, batch), truncated=batch.truncated)
            shape = self.shape(self._as_held(target, batch).schema)
            return refused(self._shapes.decided(batch.rows, shape), before, shape, limit)

    def apply(self, batch: TableBatch) -> TableRecord:
        """See Sink.apply."""
        self.pace.begins()
        attempts = Retrying(
            retry=retry_if_exception_type(CommitFailedError),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        # what a retry mends, a protocol that changed meanwhile among it, is not looked at before the last one
        with self._alone(batch.schema), asking(self._settings.uri_of(batch.schema)):
            return attempts(self._attempt, batch)

    def fill(self, batch: TableBatch, rows: DataFrame) -> TableRecord:
        """As apply, for a target without rows: `rows` are all of it, in the target's own columns, none twice.

        Only for a session with Delta. Raises what reading the frame raises; the target then is still empty.
        """
        target = self._target(batch.schema)
        shape = self.shape(batch.schema)
        source = shape.finished_frame(rows.selectExpr("*", f"'u' AS {OP}"))
        with ONE_SPARK_WRITE, refusing(batch.schema.topic):
            merge_with_spark(target, source, shape.key, TxnMarker(target.app_id, batch.upto))
        return self._filled(batch, target)

    def folder(self, schema: TableSchema) -> TargetFolder | None:
        """Where executors may write files for `adopt`; None where Spark's own writer is asked for or needed."""
        target = self._target(schema)
        by_spark = self._settings.writer is Writer.SPARK or self.shape(schema).expressions is not None
        if by_spark or "://" in target.uri or target.table.metadata().partition_columns:
            return None
        return TargetFolder(target.uri, target.described)

    def adopt(self, batch: TableBatch, files: Sequence[DataFile]) -> TableRecord:
        """As fill, with rows that stand in files of the folder already."""
        target = self._target(batch.schema)
        target.add(files, batch.upto)
        return self._filled(batch, target)

    def _filled(self, batch: TableBatch, target: DeltaTarget) -> TableRecord:
        target.take_key(batch.schema, None, replaced=True)
        if batch.generation is not None:
            target.complete_generation(batch.generation)
        return self._record(batch, target, batch.upto)

    def publish(self, record: Published) -> None:
        """See Sink.publish."""
        hit("delta_before_publish")
        self._opened().write(record)
        self._remember(record)
        self.parked.tidy()
        self.pace.ends()
        self._upkeep.turn(self._opened().cuts, self._targets)

    def keep(self, record: Published) -> str:
        """See Sink.keep; the upkeep of this driver leaves the versions alone until they are released."""
        versions = {uri: self._newest(uri, version, record) for uri, version in record.versions.items()}
        handle = json.dumps(versions, sort_keys=True)
        self._upkeep.hold(handle, versions)
        return handle

    def _newest(self, uri: str, published: int, record: Published) -> int:
        """The version that a reader finds now, unless a table stands elsewhere: another hand may have been there."""
        tables = [t for t in record.tables.values() if t.target == uri and t.state != TargetState.FAILED]
        try:
            target = DeltaTarget.open(uri) if tables else None
            if target is None or any(self._touched_upto(part_of(target, t.relation), t) > t.position for t in tables):
                return published
        except TargetUnusable:
            return published  # the next batch of the table says so
        return target.version

    def release(self, handle: str) -> None:
        """See Sink.release."""
        self._upkeep.let_go(handle)

    def close(self) -> None:
        """See Sink.close."""
        self._targets.clear()
        self._watch.forget()
        self._erased.clear()
        self._published = None

    def _remember(self, record: Published) -> None:
        self._position, self._records, self._versions = record.position, dict(record.tables), record.versions

    def _opened(self) -> PublishedTable:
        if self._published is None:
            raise ValueError(f"sink {self.name!r} is not open")
        return self._published

    def _standing(self, record: TableRecord) -> TableRecord:
        """The record, or where its target really stands when a crash left it ahead of what was published."""
        try:
            target = None if record.state == TargetState.FAILED else opened(record.target, record.relation)
            applied = 0 if target is None else target.applied or 0
        except TargetUnusable as exc:
            return replace(record, state=TargetState.FAILED.value, reason=reason(exc))
        if target is None or applied <= record.position:
            return record
        return placed(replace(record, position=applied, version=target.version), self._position)

    def _has_upto(self, target: DeltaTarget, topic: str) -> int:
        """The position up to which the rows of a table are in its target."""
        latest = self._settings.of(topic).keeping is HistoryMode.LATEST
        return target.applied or 0 if latest else changed_upto(target)

    def _touched_upto(self, target: DeltaTarget, record: TableRecord) -> int:
        return max(target.applied or 0, self._erased_upto(target, record.relation))

    def _erased_upto(self, target: DeltaTarget, relation: int) -> int:
        """The end of the range with which a truncate or the end of a copy took rows last; more may not have come."""
        # sought once: what came later is known
        if relation not in self._erased:
            self._erased[relation] = target.transaction(ERASED) or 0
        return self._erased[relation]

    def _parked_upto(self, record: TableRecord) -> int:
        """Up to where what was parked of a table counts: as far as its target has the other rows."""
        latest = self._settings.of(record.topic).keeping is HistoryMode.LATEST
        try:
            target = None if latest or not record.target else DeltaTarget.open(record.target)
            return record.position if target is None else max(record.position, changed_upto(target))
        except TargetUnusable:
            return record.position  # it stands still

    def _attempt(self, batch: TableBatch) -> TableRecord:
        """One try, safe to repeat: it begins with what the target says of itself now."""
        target, topic = self._target(batch.schema), batch.schema.topic
        if batch.schema.relation not in self._records:
            self._begin(target, batch)
        self._watch.before(target, topic, self._versions.get(target.uri))
        if (target.applied or -1) < batch.upto:
            held = target.actions
            self._bring(target, batch)
            self.pace.rewrote(topic, rewritten(held, target.actions))
            self._watch.after(target, topic)
        # a crash may have left it further than upto; then it does not belong to the cut at upto
        stands = max(self._has_upto(target, batch.schema.topic), self._erased_upto(target, batch.schema.relation))
        return self._record(batch, target, max(batch.upto, stands))

    def _bring(self, target: DeltaTarget, batch: TableBatch) -> None:
        self._check_columns(target, batch)
        batch = self._as_held(target, batch)
        shape = self.shape(batch.schema)
        if self._settings.of(batch.schema.topic).keeping is not HistoryMode.LATEST:
            self._bring_history(target, since_copied(batch, self._known(batch.schema)), shape)
            return
        before, known = replace(self._before(target, batch), truncated=batch.truncated), self._known(batch.schema)
        if target.columns_of <= batch.upto:
            settings = self._settings.of(batch.schema.topic)
            gone = dropped(settings.dropped_columns, target.columns, batch.schema, known)
            replaced = self._replaced(target, batch)
            target.follow(shape.columns, settings.schema_changes, batch.upto, replaced=replaced, gone=gone)
        if known is not None:  # else every row is of this range
            target.refill(_defaults(shape, known.columns), self._began(batch))
        source = self._source(target, batch, before)
        merges = not isinstance(source, pa.Table) or source.num_rows > 0
        choice = self._writers.choice(target, batch, source, shape.key) if merges else None
        if batch.generation is not None:
            target.complete_generation(batch.generation)
        if choice is not None and (batch.truncated is not None or batch.generation is not None):
            self._erased[batch.schema.relation] = batch.upto
        target.erase(batch.truncated, batch.generation, batch.upto, "" if choice is None else ERASED)
        hit("delta_before_merge")
        if choice is not None:
            self._writers.merge(target, source, shape.key, TxnMarker(target.app_id, batch.upto), choice)
        hit("delta_after_merge")

    def _bring_history(self, target: DeltaTarget, batch: TableBatch, shape: RowShape) -> None:
        settings, known = self._settings.of(batch.schema.topic), self._known(batch.schema)
        defaults = _defaults(shape, first_columns(target, shape.schema) if known is None else known.columns)
        columns = all_columns(shape, settings.keeping)
        if target.columns_of <= batch.upto:
            # older versions stay, so that no copy replaces every row
            note_older(target, columns, defaults.keys())
            target.follow(columns, settings.schema_changes, batch.upto, replaced=False)
        else:
            note_before(target, columns, batch.upto)
        refill(target, defaults, settings.keeping)

        def write(source: pa.Table, finds: tuple[str, ...], mark: TxnMarker) -> None:
            check_parts(source, shape.parted, batch.schema.topic)
            self._writers.merge(target, source, finds, mark, self._writers.choice(target, batch, source, finds))

        HistoryTarget(target, shape, settings, write).bring(batch)

    def _known(self, schema: TableSchema) -> TableSchema | None:
        """The table as it was when it was last published."""
        known = self._records.get(schema.relation)
        return None if known is None or known.schema is None else _schema_of(known.schema)

    def _check_columns(self, target: DeltaTarget, batch: TableBatch) -> None:
        """Raise SchemaNotApplicable for what only a full copy can mend; note by what rows are found."""
        self._rules.check_left_out(target.uri, target.columns, batch.schema)
        before = self._known(batch.schema)
        target.take_key(batch.schema, before, replaced=batch.copied)
        settings = self._settings.of(batch.schema.topic)
        ignored = settings.schema_changes is SchemaChanges.IGNORE
        replaced = batch.copied and settings.keeping is HistoryMode.LATEST
        if not ignored and not replaced and target.columns_of <= batch.upto:
            check_left_out(self.shape(batch.schema).schema, before, target.columns)

    def _replaced(self, target: DeltaTarget, batch: TableBatch) -> bool:
        """Whether a full copy brings every row again.

        In a target of many tables older rows cannot wait for that in other columns: they have to go with this batch.
        """
        if target.part is None:
            return batch.copying or batch.copied
        return batch.generation is not None and (target.applied or 0) < batch.generation

    def _as_held(self, target: DeltaTarget, batch: TableBatch) -> TableBatch:
        """The batch with the columns and types that its rows have in this target; a transform names its own."""
        shape = self.shape(batch.schema)
        # whether it has the columns of a longer range already, from before a crash
        ahead = target.columns_of > batch.upto
        if shape.transform is not None:
            rule = shape.transform.rule
            if not ahead or rule.python is not None:
                return batch
            return replace(batch, schema=held_before(batch.schema, rule, target.columns, shape.policy))
        changes = SchemaChanges.IGNORE if ahead else self._settings.of(batch.schema.topic).schema_changes
        return replace(batch, schema=held_as(batch.schema, target.columns, changes, shape.policy))

    def _began(self, batch: TableBatch) -> int:
        """Where the range of the rows began: a table that was left ahead is folded from the cut on, as all others."""
        return min(batch.after, self._position) if self._records else batch.after

    def _before(self, target: DeltaTarget, batch: TableBatch) -> BaseLookup:
        """The target as the range found it, also when an earlier attempt went further."""
        began = self._began(batch)
        if max(target.applied or 0, self._erased_upto(target, batch.schema.relation)) <= began:
            return BaseLookup(target.table, part=target.part, reads=target.reads)
        known = self._records.get(batch.schema.relation)
        if known is None or known.version is None:
            return BaseLookup(None)
        if known.position <= began:
            older = DeltaTable(target.uri, version=self._versions[known.target])
            return BaseLookup(older, part=target.part, reads=target.reads)
        return BaseLookup(DeltaTable(target.uri), exact=False, part=target.part, reads=target.reads)

    def _source(self, target: DeltaTarget, batch: TableBatch, before: BaseLookup) -> pa.Table | DataFrame:
        """What to merge: a frame where the batch is one and Spark writes."""
        shape = self.shape(batch.schema)
        if batch.frame is not None and self._writers.by_spark and batch.schema.key:
            return shape.finished_frame(
                frame_source(batch.frame, before, shape, lambda images: self._shapes.decided(images, shape))
            )
        images = batch.rows if batch.frame is None else batch.frame.toArrow()
        if images is None:
            return self._shapes.finished(shape.source.empty_table(), shape)
        if batch.schema.key:
            return self._shapes.finished(table_source(self._shapes.decided(images, shape), before, shape), shape)
        # an earlier attempt may have gone into the range: what came or went once must not do so again
        applied = target.applied or 0
        behind = images.filter(pc.greater(images["position"], applied))
        # a row that goes is not there while its table is copied, or where a crash left it erased
        lenient = batch.copying or self._erased_upto(target, batch.schema.relation) > applied
        made = counted_source(behind, target.table, shape, batch.truncated, lenient=lenient)
        return self._shapes.finished(made, shape)

    def _target(self, schema: TableSchema) -> DeltaTarget:
        uri, shape = self._uri(schema), self.shape(schema)
        keeping = self._settings.of(schema.topic).keeping
        target, layout = self._targets.get(uri), replace(self._shapes.layout(shape), keeping=keeping)
        self._shapes.take(uri, schema)
        if target is None:
            target = DeltaTarget.open(uri) or self._created(uri, schema, layout)
        else:
            target.refresh()
        if layout.merged:
            return self._shard(target, schema, layout)
        target.check_identity(self._log_id, schema)
        target.check_layout(layout)
        self._targets[uri] = target
        return self._writers.writable(target, layout)

    def _shard(self, whole: DeltaTarget, schema: TableSchema, layout: TableLayout) -> SharedTarget:
        """The part of a table in a target of many."""
        whole.check_log(self._log_id)
        whole.check_layout(layout)
        self._targets[whole.uri] = self._writers.writable(whole, layout)
        target = SharedTarget(whole, schema.relation)
        if target.relation is None:
            self._check_new(schema)
            check_named(schema, self._settings.rules)
        target.take(schema, self.shape(schema).columns)
        return target

    @contextmanager
    def _alone(self, schema: TableSchema) -> Iterator[None]:
        """While none of the other tables that share its target is merged."""
        with self._writing.setdefault(self._uri(schema), RLock()):
            yield

    def _uri(self, schema: TableSchema) -> str:
        """Where its name says, or where its target was made before the table was renamed: a replay moves it."""
        named, known = self._settings.uri_of(schema), self._records.get(schema.relation)
        if known is None or known.target in {"", named}:
            return named
        for uri in (named, known.target):
            whole = self._targets.get(uri) or DeltaTarget.open(uri)
            if whole is not None and part_of(whole, schema.relation).relation == schema.relation:
                return uri
        return named

    def _check_new(self, schema: TableSchema) -> None:
        """Raise TargetUnusable for a table that had a target: what is in the log from here on is not all of it."""
        known = self._records.get(schema.relation)
        if known is not None and known.version is not None:
            raise TargetUnusable(
                f"the rows of table {schema.topic!r} are not at {known.target!r} any more",
                remedy="put them back and start again, or build it anew: 'cdc replay SINK --tables TABLE'",
            )

    def _created(self, uri: str, schema: TableSchema, layout: TableLayout) -> DeltaTarget:
        self._check_new(schema)
        check_named(schema, self._settings.rules)
        check_kept(schema, layout.keeping)
        shape = self.shape(schema)
        return DeltaTarget.create(uri, self._log_id, shape.schema, all_columns(shape, layout.keeping), layout)

    def _begin(self, target: DeltaTarget, batch: TableBatch) -> None:
        """Give a target that nothing was written to the columns of the range: a longer one, before a crash, made it."""
        marks = (target.transaction(suffix) for suffix in ("", ROWS, ERASED, COLUMNS))
        if target.part is not None or target.files()[0] or any(mark is not None for mark in marks):
            return
        columns = all_columns(self.shape(batch.schema), self._settings.of(batch.schema.topic).keeping)
        younger = only_in(target.columns, columns)
        target.follow(columns, SchemaChanges.EVOLVE, batch.upto, replaced=True, gone=younger)

    def _record(self, batch: TableBatch, target: DeltaTarget, position: int) -> TableRecord:
        schema = batch.schema
        state = applied_state(batch, self._records.get(schema.relation), complete=target.complete)
        return TableRecord(
            relation=schema.relation,
            topic=schema.topic,
            target=target.uri,
            position=position,
            version=target.version,
            state=state.value,
            reason=None,
            schema=schema.to_json().decode(),
        )


def _defaults(shape: RowShape, held: Iterable[Column]) -> dict[str, str]:
    """Delta column → expression, for columns with a default that are not among those that were held."""
    ids = {column.id for column in held}
    return {
        column_name(column.name): default_expression(column, shape.missing(column) or "", shape.policy)
        for column in shape.schema.sent
        if column.missing is not None and column.id not in ids
    }


@lru_cache(maxsize=1024)
def _schema_of(payload: str) -> TableSchema:
    """The same record is asked for with every batch."""
    return TableSchema.from_json(payload)
