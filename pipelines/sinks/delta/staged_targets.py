"""Staged targets: new targets that a replay builds; each of them replaces an old target in one overwriting commit.

A staged table is in a directory inside the table that it will replace, so no file is copied. The overwriting commit
removes every old file and adds the new files at their paths. It also contains the new schema and the positions of the
tables as `txn` actions. The target keeps its path, its identity and its Delta history. A reader sees either the old
table or the new one. The overwriting commit fails if another client committed to the target since it was opened.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import CommitProperties, DeltaTable, TableFeatures, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction

from cdc.errors import SchemaNotApplicable, SinkFenced, TargetDamaged
from cdc.failpoint import hit
from cdc.table import TableSchema
from cdc.target_names import parked_uri
from cdc.targets.current_rows import MODE
from cdc.targets.path_ownership import STAGED
from cdc.targets.published_record import Published, TableRecord
from cdc.targets.target_rule_changes import TRANSFORM, TargetRules
from pipelines.sinks.delta.commit_sync import LOG, sync_commits
from pipelines.sinks.delta.damaged_commits import remove_damaged_commits
from pipelines.sinks.delta.dead_letters import DeadLetterTable
from pipelines.sinks.delta.delta_target import COLUMNS, ERASED, ROWS, DeltaTarget
from pipelines.sinks.delta.erase_earlier_versions import erase_earlier, is_marked, mark_to_erase
from pipelines.sinks.delta.new_data_files import delta_bounds
from pipelines.sinks.delta.published_cuts_table import PublishedTable
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.target_columns import rules_in_subdirectory
from pipelines.sinks.delta.target_layout import DELETION_VECTORS, STATISTICS, NewTarget, partition_text
from pipelines.sinks.delta.target_part import (
    GENERATION,
    KEYLESS,
    RELATION,
    delete_other_tables,
    shared_tables,
    shared_txn_id,
)
from pipelines.sinks.delta.unsupported_feature_errors import MOVE_AND_REBUILD, unsupported

if TYPE_CHECKING:
    pass

_NTZ: Final = "timestampNtz"


class StagedDelta:
    """The new targets that a replay fills through the attribute `sink`; `put` replaces the old targets by them.

    Only one process may use an instance. After a crash before `put`, the old targets are unchanged. After a crash
    during `put`, each target is either old or new, and the published record still names the old cut. The replay can
    then be repeated.
    """

    def __init__(self, settings: DeltaSettings) -> None:
        self._settings = settings
        self._rules = TargetRules(settings.table, settings.rules)
        self.erased: dict[str, int] = {}
        """URI of a target → number of files that `put` deleted because they contained values that the rules hide."""
        self._name = STAGED + uuid.uuid4().hex[:12]
        self._records = settings.record_uri.rpartition("/")[0]
        staged = replace(
            settings,
            name=f"{settings.name} (replay)",
            path=f"{settings.path}/{self._name}",
            rules=rules_in_subdirectory(settings.rules, self._name),
            record=f"{self._records}/{self._name}",
            is_staged=True,
        )
        self.sink = DeltaSink(staged)

    def forget_earlier(self, schemas: Mapping[int, TableSchema]) -> None:
        """Remove the targets that earlier replays built for these tables and did not put in place."""
        for name in [entry.base_name for entry in _entries(self._records) if entry.base_name.startswith(STAGED)]:
            for schema in schemas.values():
                _remove_staged(self._settings.uri_of(schema), name)
            remove(f"{self._records}/{name}")

    def open_published(self, log_id: str) -> Published | None:
        """Return the published record of the sink, None if nothing was published.

        If another driver publishes after this call, `put` raises SinkFenced.
        """
        self._published = PublishedTable.open(self._settings.record_uri, log_id)
        return self._published.record()

    def put(self, built: Published, rest: Mapping[int, TableRecord]) -> Published:
        """Replace every old target by its staged target, publish the new cut, and return its record.

        built: the record of the staged sink. rest: the records of the tables that the replay did not build. Call this
        method once, after `open_published`. Raises SinkFenced if another driver writes at the same time. Raises
        SchemaNotApplicable for a target with column mapping, or if its partition columns differ from those of its rule.
        """
        log_id = self._published.log_id
        replaced: dict[int, TableRecord] = {}
        rows = [row for relation in built.tables for row in self.sink.parked.rows_of(relation).values()]
        hiding = self._mark_hidden_values(built.tables.values())
        DeadLetterTable(self._settings.parked_uri).add_rebuilt(rows, built.position, hiding)
        for records in by_target(built.tables.values()):
            hit("replay_before_table")
            self._published.check()
            replaced |= self._replace_target(records, log_id)
            hit("replay_after_table")
        published = replace(built, tables={**rest, **replaced})
        hit("replay_before_publish")
        marked = {one.target for one in replaced.values() if is_marked(DeltaTable(one.target))}
        self._published.write(published, marked)
        self._remove_staging(built)
        self.erased = {target: erase_earlier(target, published.versions[target]) for target in sorted(marked)}
        if marked:
            DeadLetterTable(self._settings.parked_uri).rewrite(published)
        return published

    def discard(self) -> None:
        """Close the staged sink. The next replay removes the staged files that no target uses."""
        self.sink.close()

    def _mark_hidden_values(self, records: Iterable[TableRecord]) -> set[int]:
        """Find old targets whose stored rows contain values that the current rules hide. Mark these targets for
        erasing, and return the relations of their tables.
        """
        found = set[int]()
        for record in records:
            schema = TableSchema.from_json(record.schema or "")
            target = _readable(self._settings.uri_of(schema))
            if target is None:
                continue
            target.check_log(self._published.log_id)
            if is_marked(target.table) or self._rules.exposes(target.table, schema.topic, schema) is not None:
                mark_to_erase(target)
                found.add(record.relation)
        return found

    def _replace_target(self, records: Sequence[TableRecord], log_id: str) -> dict[int, TableRecord]:
        """Replace one target by its staged table.

        records: the records of all tables in the target. Returns the new record of each of these tables, by relation.
        """
        schema = TableSchema.from_json(records[0].schema or "")
        uri = self._settings.uri_of(schema)
        staged = DeltaTarget(records[0].target, DeltaTable(records[0].target))
        layout = replace(staged.layout, has_vectors=self._settings.has_vectors(schema.topic))
        target = self._opened_old(uri, log_id, NewTarget(schema, staged.columns, layout))
        target.check_log(log_id)
        _check_replaceable(target, staged)
        if staged.is_shared:  # a table whose rebuild failed may have some rows
            delete_other_tables(staged, {record.relation for record in records})
        _make_ready(target, staged, has_vectors=layout.has_vectors)
        _overwrite(target, staged, self._name, _positions(target, records))
        _copy_properties(target, staged)
        # the published cut names these commits: they and the staged files have to be on the disk before it
        sync_commits(uri, self._published_version(uri), target.version)
        return {
            record.relation: replace(record, target=uri, version=target.version, merged=record.position)
            for record in records
        }

    def _opened_old(self, uri: str, log_id: str, new: NewTarget) -> DeltaTarget:
        """Open the target at uri, or create an empty one: instead of one that is damaged, or if there is none.

        A created target may have values that the rules hide in files of the damaged one, so it is marked for erasing.
        Kept cuts and views name versions that a restored or created target does not have; it skips them.
        """
        published = self._published_version(uri)
        with suppress(TargetDamaged):
            remove_damaged_commits(uri, published)
        target = _readable(uri)
        if target is None:
            remove(f"{uri}/{LOG}")
            target = DeltaTarget.create(uri, log_id, new, over_files=published >= 0)
            if published >= 0:
                mark_to_erase(target)
        if target.version < published:
            target.skip_to(published + 1)
        return target

    def _published_version(self, uri: str) -> int:
        """Return the version of a target in the published record of the sink; -1 if the record does not name it."""
        record = self._published.record()
        return -1 if record is None else record.versions.get(uri, -1)

    def _remove_staging(self, built: Published) -> None:
        for record in built.tables.values():
            remove(f"{record.target}/_delta_log")
        remove(f"{self._records}/{self._name}")
        remove(parked_uri(f"{self._records}/{self._name}"))


def _readable(uri: str) -> DeltaTarget | None:
    """Return the target at uri; None if there is none, or if its Delta log is damaged."""
    try:
        return DeltaTarget.open(uri)
    except TargetDamaged:
        return None


def by_target(records: Iterable[TableRecord]) -> list[list[TableRecord]]:
    """Group records by target: one list per target, with several records if the tables share the target."""
    found: dict[str, list[TableRecord]] = {}
    for record in records:
        found.setdefault(record.target, []).append(record)
    return list(found.values())


def remove(uri: str) -> None:
    """Delete a directory and everything in it, if it exists."""
    system, path = pafs.FileSystem.from_uri(uri)
    if system.get_file_info(path).type == pafs.FileType.Directory:
        system.delete_dir(path)


def _entries(uri: str) -> list[pafs.FileInfo]:
    system, path = pafs.FileSystem.from_uri(uri)
    return list(system.get_file_info(pafs.FileSelector(path, allow_not_found=True)))


def _remove_staged(uri: str, name: str) -> None:
    target = _readable(uri)
    files = () if target is None else target.table.file_uris()
    # the directory contains live files of the table if a replay was killed after its overwriting commit
    remove(f"{uri}/{name}/_delta_log" if any(f"/{name}/" in file for file in files) else f"{uri}/{name}")


def _check_replaceable(target: DeltaTarget, staged: DeltaTarget) -> None:
    if features := target.unwritable_features:
        raise unsupported(target.uri, features, "it cannot be overwritten in one step", remedy=MOVE_AND_REBUILD)
    configuration = target.table.metadata().configuration
    mapped = configuration.get("delta.columnMapping.mode", "none") != "none"
    if mapped or target.layout.partition_by != staged.layout.partition_by:
        cause = "it uses column mapping" if mapped else "its rule names other partition columns than the target"
        raise SchemaNotApplicable(
            f"target {target.uri!r} cannot be overwritten in one step, because {cause}",
            remedy="replay with --into PATH, then move the new tables to the sink's path by hand",
        )


def _make_ready(target: DeltaTarget, staged: DeltaTarget, *, has_vectors: bool) -> None:
    """Prepare the old target for the overwriting commit: add table features and set properties that the new rows need.

    has_vectors: whether to enable deletion vectors, if the target does not have the property that enables or disables
    them.
    """
    wanted, present = (table.protocol().writer_features or [] for table in (staged.table, target.table))
    if _NTZ in wanted and _NTZ not in present:
        feature = TableFeatures.TimestampWithoutTimezone
        target.table.alter.add_feature(feature, allow_protocol_versions_increase=True)
    if has_vectors and target.read_property(DELETION_VECTORS) is None:
        target.set_property(DELETION_VECTORS, "true")
    described, other = (table.metadata().configuration.get(STATISTICS) for table in (staged.table, target.table))
    if described is not None and described != other:
        # columns that only one of the two has must not be named while the schema changes
        both = [name for name in described.split(",") if name in target.columns.names]
        target.set_property(STATISTICS, ",".join(both))


def _positions(target: DeltaTarget, records: Sequence[TableRecord]) -> list[Transaction]:
    """Return the `txn` actions of the overwriting commit: the new positions of all tables with rows in the target.

    In a shared target a table that the replay did not build gets position 0, because its rows are removed.
    """
    if not target.is_shared:
        # a replay may end before the old target's changes did, or those of its columns
        return [Transaction(target.app_id + suffix, records[0].position) for suffix in ("", ROWS, ERASED, COLUMNS)]
    positions = dict.fromkeys(shared_tables(target.columns), 0) | {one.relation: one.position for one in records}
    ids = {shared_txn_id(target.identity, relation): position for relation, position in positions.items()}
    return [Transaction(id_ + suffix, position) for id_, position in ids.items() for suffix in ("", ERASED)]


def _overwrite(target: DeltaTarget, staged: DeltaTarget, directory: str, positions: Sequence[Transaction]) -> None:
    try:
        target.table.create_write_transaction(
            list(_additions(staged.table, directory)),
            "overwrite",
            staged.table.schema(),
            # no retries: a retry would overwrite commits that came in between
            commit_properties=CommitProperties(max_commit_retries=0, app_transactions=list(positions)),
        )
    except CommitFailedError as exc:
        raise SinkFenced(f"another process wrote to target {target.uri!r} while the replay replaced its rows") from exc
    target.current.reopen()


def _copy_properties(target: DeltaTarget, staged: DeltaTarget) -> None:
    """Copy the properties of the staged table to the target, after the overwriting commit."""
    present, wanted = target.table.metadata().configuration, staged.table.metadata().configuration
    copied = {n: wanted[n] for n in (RELATION, GENERATION, STATISTICS) if n in wanted}
    copied |= {TRANSFORM: "", MODE: "", KEYLESS: wanted.get(KEYLESS, ""), **staged.layout.configuration}
    changed = {name: value for name, value in copied.items() if (present.get(name) or "") != value}
    if changed:
        target.set_properties(changed)


def _additions(table: DeltaTable, directory: str) -> Iterator[AddAction]:
    files = pa.table(table.get_add_actions(flatten=True))
    now = int(time.time() * 1000)
    bounds = {kind: _bounds(files, kind) for kind in ("min", "max")}
    missing = {name.partition(".")[2]: name for name in files.column_names if name.startswith("null_count.")}
    partitions = {name.partition(".")[2]: name for name in files.column_names if name.startswith("partition.")}
    columns = ["path", "size_bytes", "num_records", *missing.values(), *partitions.values()]
    for number, file in enumerate(files.select(columns).to_pylist()):
        values = {column: partition_text(file[name]) for column, name in partitions.items()}
        statistics: dict[str, Any] = {
            "numRecords": file["num_records"],
            "minValues": _at(bounds["min"], number),
            "maxValues": _at(bounds["max"], number),
            "nullCount": {column: file[name] for column, name in missing.items() if file[name] is not None},
        }
        text = json.dumps(statistics, ensure_ascii=False)
        yield AddAction(f"{directory}/{unquote(file['path'])}", file["size_bytes"], values, now, True, text)


def _bounds(files: pa.Table, kind: str) -> dict[str, list[Any]]:
    """Return column name → its least (`min`) or greatest (`max`) value in each file, as in Delta's JSON statistics.

    files: the add actions of the table. kind: `min` or `max`. A column whose type JSON cannot express exactly is left
    out.
    """
    bounds: dict[str, list[Any]] = {}
    for name in files.column_names:
        prefix, _, column = name.partition(".")
        if prefix == kind and (values := delta_bounds(files[name])) is not None:
            bounds[column] = values
    return bounds


def _at(bounds: Mapping[str, list[Any]], number: int) -> dict[str, Any]:
    return {column: values[number] for column, values in bounds.items() if values[number] is not None}
