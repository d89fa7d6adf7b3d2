"""The lake gives read-only access to the Delta targets of a sink: its published record, its tables, and SQL.

Rows are read with the query engine of delta-rs (`scan`, QueryBuilder). The methods `to_pyarrow*` of delta-rs return
nulls after a column rename and fail on deletion vectors. Its method `count` ignores deletion vectors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from difflib import get_close_matches
from enum import StrEnum
from typing import Final, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError, TableNotFoundError

from cdc.config.delta_sink import DeltaSinkDefinition
from cdc.errors import (
    ConfigError,
    CutUnavailable,
    CutUnderOtherRules,
    QueryFailed,
    SinkUnavailable,
    TargetRulesChanged,
    TargetUnusable,
)
from cdc.position import Position
from cdc.table import TableSchema, split_topic, topic
from cdc.target_names import RELATION_COLUMN, name_of_segment, published_uri
from cdc.targets.cut_retention import ListedCut, find_cut
from cdc.targets.lake_access import access_error
from cdc.targets.published_record import Published, TableRecord, TargetState, by_topic
from cdc.targets.read_only_guard import checked_rows, named_errors, one_line, require_query
from cdc.targets.target_rule_changes import TargetRules
from cdc.targets.unsupported_table_features import features_in_error, unsupported_features, widened_columns

PUBLISHED_AT: Final = "published_at"
PUBLISHED_SCHEMA: Final = pa.schema(
    [("position", pa.int64()), ("committed_at", pa.int64()), ("record", pa.string()), (PUBLISHED_AT, pa.int64())]
)
"""Columns of the table `_cdc/published`, which has one row per kept cut.

Times are in µs since 1970 UTC, and `record` is the text from `Published.to_json`. The newest record contains
the table schemas; older records may not. Rows that an older version of cdc wrote have no `published_at`.
"""

_QUOTED: Final = r'"(?:[^"]|"")+"'
_NAME: Final = rf"(?:{_QUOTED}|[^\W\d]\w*)"
_TOKEN: Final = re.compile(
    rf"(?P<skip>'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/)|(?P<schema>{_NAME})\s*\.\s*(?P<table>{_NAME})|(?P<name>{_NAME})"
    r"|(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)",
    re.DOTALL,
)
DOUBLE_DIGITS: Final = 15
"""Number of digits up to which a double has every decimal number exactly."""
SHORTEST_DOUBLE_DIGITS: Final = 17
"""Maximum number of digits that a double is printed with."""
DECIMAL_DIGITS: Final = 76
"""Maximum number of digits of a decimal of the query engine."""
_MISSING: Final = re.compile(r"table '([^']*)' not found")

_T = TypeVar("_T")


class ReadAt(StrEnum):
    """The two current states of a sink's tables that a query can read.

    To read a past state, a query takes a Moment instead.
    """

    #: The last published cut: all tables at one position.
    PUBLISHED = "published"
    #: The newest version of every table; their positions may differ.
    LATEST = "latest"


Moment = Position | datetime
"""A position or a time; selects the last kept cut that contains no later change. A time without a zone is UTC."""


def parse_at(text: str) -> ReadAt | Moment:
    """Parse `published`, `latest`, a position or an ISO 8601 time; a time without a zone is UTC.

    Raises ConfigError for any other text.
    """
    if text in tuple(ReadAt):
        return ReadAt(text)
    try:
        if "/" in text:
            return Position.parse(text)
        moment = datetime.fromisoformat(text)
    except (ValueError, ConfigError) as exc:
        raise ConfigError(
            f"malformed point in time {text!r}",
            remedy="write published, latest, a position such as 16/B374D848, or a time such as 2026-11-21T14:03:00Z",
        ) from exc
    return _zoned(moment)


def _zoned(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


class Lake:
    """Reads the Delta targets of one sink; every call reads the published record again."""

    def __init__(self, template: str, rules: TargetRules | None = None, record: str | None = None) -> None:
        """`record` is the URI of the table of published cuts, if it is not where the path template puts it."""
        self._template, self._rules = template, rules
        self._published_uri = record or published_uri(template)

    @classmethod
    def open(cls, template: str, rules: TargetRules | None = None) -> Self:
        """Return a Lake for the sink's path template, without any I/O.

        `rules` are the sink's current rules. Queries then refuse targets whose rows were not written under these rules.
        """
        return cls(template, rules)

    @classmethod
    def of(cls, sink: DeltaSinkDefinition) -> Self:
        """Return a Lake for a sink of a definition, with the sink's current rules, without any I/O."""
        return cls(sink.path, TargetRules.of(sink), sink.record_uri)

    def published(self) -> Published | None:
        """Return the published record of the sink, or None before its first cut.

        Raises SinkUnavailable if the record cannot be read.
        """
        with self._reading():
            table = self._record()
            return table and read_published(table)

    def cuts(self) -> list[ListedCut]:
        """Return the kept cuts, oldest first. Raises SinkUnavailable if they cannot be read."""
        with self._reading():
            table = self._record()
            return [] if table is None else list_cuts(table)

    def cut(self, at: ReadAt | Moment = ReadAt.PUBLISHED) -> Published:
        """Return the record of one cut. Only tables in state `streaming` belong to the cut.

        Raises CutUnavailable if the cut is not kept, and SinkUnavailable if the record cannot be read.
        """
        with self._reading():
            table = self._record()
            cuts = [] if table is None else list_cuts(table)
        newest = Position(cuts[-1].position if cuts else 0)
        moment = _zoned(at) if isinstance(at, datetime) else at if isinstance(at, Position) else newest
        found = find_cut(cuts, moment, datetime.now(UTC))
        with self._reading():
            record = None if table is None else _record_of(table, found.published_at)
        if record is None:
            raise CutUnavailable(
                f"the cut at {found} was removed by retention during the query",
                remedy="run the query again, or request a later cut",
            )
        return record

    def cut_for(self, sql: str, at: ReadAt | Moment = ReadAt.PUBLISHED) -> Published:  # noqa: ARG002 - see LakeWithViews
        """Return the record of the cut that a statement reads. Raises the errors of `cut`."""
        return self.cut(at)

    def tables(self) -> list[TableRecord]:
        """Return the tables of the published record, sorted by topic."""
        record = self.published()
        return sorted(record.tables.values(), key=lambda table: table.topic) if record else []

    def read(self, target: str, version: int | None = None) -> pa.RecordBatchReader:
        """Return a reader for the rows of one target, unordered; see `read_target`.

        If `version` is None, the newest version is read.
        """
        return read_target(target, version)

    def query(self, sql: str, at: ReadAt | Moment | Published = ReadAt.PUBLISHED) -> pa.RecordBatchReader:
        """Run a SELECT over the tables, named `schema.table`, or `table` where that is unambiguous.

        A target that several tables share can also be queried by the name of its directory. `at` may be a record that
        `cut` returned. Only tables that the query names are opened.

        Raises ConfigError for SQL that DataFusion refuses, and QueryNotReadOnly for a statement that is not a query.
        Raises QueryFailed if the query fails; reading the returned rows can raise QueryFailed too. Raises
        CutUnavailable if no cut exists at `at`, or if a table is not in the cut. Raises TargetRulesChanged or
        CutUnderOtherRules for rows that were not written under the current rules. Raises TargetUnusable for table
        features that delta-rs does not read.
        """
        if at is ReadAt.LATEST:
            tables = self.tables()
        else:
            cut = at if isinstance(at, Published) else self.cut(at)
            tables = sorted(cut.tables.values(), key=lambda table: table.topic)
            versions = cut.versions
        text, wanted = bind_tables(
            sql, {**tables_by_shared_target(tables), **{name: [table] for name, table in by_topic(tables).items()}}
        )
        builder, opened = QueryBuilder(), dict[str, DeltaTable]()
        try:
            with named_errors():
                known = {} if self._rules is None or not wanted else self._known()
                for alias, parts in wanted.items():
                    self._check_newest(parts, known)
                    version = (
                        None if at is ReadAt.LATEST else min(versions[check_in_cut(part).target] for part in parts)
                    )
                    table = opened[parts[0].topic] = self._opened(parts[0], version)
                    self._check_opened(parts, known, table)
                    _register(builder, alias, table, parts)
                text = with_exact_numbers(text, has_doubles=_has_doubles(opened.values()))
                require_query(builder, text)
                return checked_rows(builder.execute(text))
        except (ConfigError, QueryFailed) as exc:
            if (features := features_in_error(str(exc.__cause__))) is not None:
                unreadable = [t for t, table in opened.items() if unsupported_features(table, to_read=True)] or [
                    *opened
                ]
                raise self._unreadable(unreadable[0], features, widened_columns(opened[unreadable[0]])) from exc
            if isinstance(exc, ConfigError):
                exc.fix = _suggestion(exc.message, tables) + _table_names(tables)
            raise

    def check_rules(self, relation: int) -> None:
        """Raise TargetRulesChanged if the table's target was not written under the rules given to `open`."""
        parts = [table for table in self.tables() if table.relation == relation]
        if parts:
            self._check_newest(parts, self._known())

    def is_shown(self, parts: Sequence[TableRecord], version: int) -> bool:
        """Return True if the rules given to `open` allow a query to read a version of a target.

        `parts` are the tables of the target.
        """
        known = self._known() if self._rules is not None else {}
        try:
            self._check_newest(parts, known)
            self._check_opened(parts, known, self._opened(parts[0], version))
        except (TargetRulesChanged, CutUnderOtherRules):
            return False
        return True

    def differences(self) -> list[tuple[str, TargetRulesChanged]]:
        """Return (topic, error) for each table whose target was not written under the rules given to `open`.

        Targets that cannot be read are skipped.
        """
        found = list[tuple[str, TargetRulesChanged]]()
        try:
            tables, known = self.tables(), self._known()
        except (DeltaError, OSError):
            return found
        for part in tables:
            try:
                self._check_newest([part], known)
            except TargetRulesChanged as exc:
                found.append((part.topic, exc))
        return found

    def _known(self) -> dict[int, TableSchema]:
        """Return relation → table schema from the newest published record; records of past cuts may have none."""
        texts = {table.relation: table.schema for table in self.tables()}
        return {relation: TableSchema.from_json(text) for relation, text in texts.items() if text is not None}

    def _check_newest(self, parts: Sequence[TableRecord], known: Mapping[int, TableSchema]) -> None:
        """Raise TargetRulesChanged if the newest version of a target was not written under the rules of this Lake."""
        if self._rules is None or not parts[0].target:
            return
        try:
            newest = self._opened(parts[0], None)
        except (SinkUnavailable, TargetUnusable):
            return  # the cut has the reason, or opening its version raises it
        for part in parts:
            if (found := self._rules.difference(newest, *_topic_and_schema(part, known))) is not None:
                raise found

    def _check_opened(self, parts: Sequence[TableRecord], known: Mapping[int, TableSchema], table: DeltaTable) -> None:
        """Raise CutUnderOtherRules if a version of a target contains data that the current rules hide."""
        if self._rules is None:
            return
        for part in parts:
            if (found := self._rules.exposes(table, *_topic_and_schema(part, known))) is not None:
                raise CutUnderOtherRules(f"version {table.version()} of table {part.topic!r} {found}")

    def _opened(self, part: TableRecord, version: int | None) -> DeltaTable:
        try:
            return _table(part.target, version)
        except SinkUnavailable as exc:
            if isinstance(exc.__cause__, TableNotFoundError):
                exc.fix = f"restore the target's files, or rebuild the table: 'cdc replay SINK --tables {part.topic}'"
            if (features := features_in_error(str(exc.__cause__))) is None:
                raise
            raise self._unreadable(part.topic, features) from exc

    def _unreadable(self, topic: str, features: str, columns: Sequence[str] = ()) -> TargetUnusable:
        which = f" (the type of column {', '.join(map(repr, columns))} was widened)" if columns else ""
        return TargetUnusable(
            f"the target of table {topic!r} has table features that delta-rs does not read: {features}{which}",
            remedy=f"read the target with Spark: pipelines.lake.at(spark, {self._template!r})[{topic!r}]; or move the "
            f"target away and rebuild the table: 'cdc replay SINK --tables {topic}'",
        )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise SinkUnavailable if the block fails to read the published record."""
        try:
            yield
        except (DeltaError, pa.ArrowException, OSError, ValueError, KeyError, TypeError) as exc:
            if (error := access_error(exc, f"the published record {self._published_uri!r}")) is not None:
                raise error from exc
            raise SinkUnavailable(
                f"the published record {self._published_uri!r} cannot be read: {one_line(str(exc))[:160]}",
                remedy="restore the record's files from a backup, or rebuild the sink: 'cdc replay SINK'",
            ) from exc

    def _record(self) -> DeltaTable | None:
        try:
            return DeltaTable(self._published_uri)
        except TableNotFoundError:
            return None


def tables_by_shared_target(tables: Iterable[TableRecord]) -> dict[str, list[TableRecord]]:
    """Return the tables of each shared target, by the name of the target's directory; leave out other tables.

    Dropped tables are left out as well, unless all tables of the target were dropped.
    """
    found: dict[str, list[TableRecord]] = {}
    for table in tables:
        found.setdefault(table.target, []).append(table)
    return {
        name_of_segment(uri.rpartition("/")[2]): [t for t in parts if t.state != TargetState.DROPPED] or parts
        for uri, parts in found.items()
        if uri and len(parts) > 1
    }


def _register(builder: QueryBuilder, alias: str, table: DeltaTable, parts: Sequence[TableRecord]) -> None:
    """Register a target in the query engine under the name `alias`.

    If several tables share the target, queries of `alias` return only the rows of the tables in `parts`.
    """
    if RELATION_COLUMN not in [field.name for field in table.schema().fields]:
        builder.register(alias, table)
        return
    whole = _quoted(f"{_plain(alias)} of all")
    builder.register(whole, table)
    numbers = ", ".join(str(int(part.relation)) for part in parts)
    view = f"CREATE VIEW {alias} AS SELECT * FROM {whole} WHERE {RELATION_COLUMN} IN ({numbers})"
    builder.execute(view).read_all()


def _topic_and_schema(part: TableRecord, known: Mapping[int, TableSchema]) -> tuple[str, TableSchema | None]:
    """Return the topic with which rules match a table, and the table's schema; the schema is None if unknown."""
    schema = known.get(part.relation)
    return part.topic if schema is None else schema.topic, schema


def check_in_cut(table: TableRecord) -> TableRecord:
    """Return the table record if the table belongs to its cut.

    Otherwise raises CutUnderOtherRules if the record gives this error as the reason, and CutUnavailable if it does not.
    """
    if (table.reason or "").startswith(CutUnderOtherRules.code):
        raise CutUnderOtherRules(f"table {table.topic!r} is no longer in the cut: {table.reason}")
    if table.state != TargetState.STREAMING:
        why = "" if table.reason is None else f" ({table.reason})"
        later = "" if table.state == TargetState.DROPPED else ", or request a later cut"
        raise CutUnavailable(
            f"table {table.topic!r} is not part of the cut: {table.state} at {Position(table.position)}{why}",
            remedy=f"use '--at latest' to read every table as it is now{later}",
        )
    return table


def read_target(target: str, version: int | None = None) -> pa.RecordBatchReader:
    """Return a reader that streams the rows of a Delta table at a version; None means the newest version.

    String and binary columns have view types such as `string_view`. Raises SinkUnavailable if the table or version
    does not exist.
    """
    return pa.RecordBatchReader.from_stream(_table(target, version).scan())


def read_published(table: DeltaTable) -> Published | None:
    """Return the newest record in an opened `_cdc/published` table, or None if the table is empty."""
    files = pa.table(table.get_add_actions(flatten=True))
    newest = f"max.{PUBLISHED_AT}"
    return _record_of(table, pc.max(files[newest]).as_py() or 0 if newest in files.column_names else 0)


def list_cuts(table: DeltaTable) -> list[ListedCut]:
    """Return the cuts in an opened `_cdc/published` table, oldest first."""
    known = {field.name for field in table.schema().fields}
    rows = pa.table(table.scan(columns=[name for name in ("position", "committed_at", PUBLISHED_AT) if name in known]))
    cuts = [ListedCut(row["position"], row["committed_at"], row.get(PUBLISHED_AT) or 0) for row in rows.to_pylist()]
    return sorted(cuts, key=lambda cut: cut.published_at)


def _record_of(table: DeltaTable, published_at: int) -> Published | None:
    """Return the record with this publish time; None if there is none.

    A publish time of 0 selects the record that an older version of cdc wrote.
    """
    known = {field.name for field in table.schema().fields}
    earlier = f"{PUBLISHED_AT} IS NULL" if PUBLISHED_AT in known else None
    rows = pa.table(
        table.scan(columns=["record"], predicate=f"{PUBLISHED_AT} = {published_at}" if published_at else earlier)
    )
    return Published.from_json(rows["record"][0].as_py()) if rows.num_rows else None


def aliases(topics: Iterable[str]) -> dict[str, str]:
    """Return the SQL alias of each topic: the table's name if it is unique, otherwise `schema__table`."""
    parts = {table: split_topic(table) for table in topics}
    names = [name for _, name in parts.values()]
    return {table: name if names.count(name) == 1 else f"{schema}__{name}" for table, (schema, name) in parts.items()}


def bind_tables(sql: str, tables: Mapping[str, _T]) -> tuple[str, dict[str, _T]]:
    """Replace table names in SQL by aliases, and return the SQL and alias → table for the tables that it names.

    The query engine has no schemas. So `shop.orders` becomes `orders` if no other schema has a table of that name,
    otherwise `shop__orders`. Literals and comments do not change.
    """
    alias_of = aliases(tables)
    topic_of = {alias: table for table, alias in alias_of.items()}
    used: dict[str, _T] = {}

    def replaced(match: re.Match[str]) -> str:
        if match["skip"] or match["number"]:
            return match.group()
        if match["schema"]:
            whole = topic(_plain(match["schema"]), _plain(match["table"]))
            # otherwise it is a column of a table, as in `orders.id`
            named, rest = (
                (whole, "") if whole in tables else (topic_of.get(_plain(match["schema"])), "." + match["table"])
            )
        else:
            name = _plain(match["name"])
            # a topic in one pair of quotes, such as "shop.orders"
            named, rest = topic_of.get(name) or (name if name in tables else None), ""
        if named is None:
            return match.group()
        used[_quoted(alias_of[named])] = tables[named]
        return _quoted(alias_of[named]) + rest

    return _TOKEN.sub(replaced, sql), used


def with_exact_numbers(sql: str, *, has_doubles: bool) -> str:
    """Return the SQL with decimals in place of the number literals that the query engine would round to a double.

    The engine reads integers up to 64 bits exactly, and all other numbers as doubles. A number with more digits than a
    double can be printed with is no double. With fewer digits it may be one, so it stays a double in a query of tables
    that have doubles (`has_doubles`).
    """
    exact = SHORTEST_DOUBLE_DIGITS if has_doubles else DOUBLE_DIGITS

    def replaced(match: re.Match[str]) -> str:
        number = match["number"]
        if number is None or "e" in number.lower() or (number.isdigit() and int(number) < 1 << 64):
            return match.group()
        whole, _, fraction = number.partition(".")
        digits = len((whole + fraction).lstrip("0"))
        precision = max(len(whole.lstrip("0")) + len(fraction), 1)
        if digits <= exact or precision > DECIMAL_DIGITS:
            return match.group()
        return f"CAST('{number}' AS DECIMAL({precision}, {len(fraction)}))"

    return _TOKEN.sub(replaced, sql)


def _has_doubles(tables: Iterable[DeltaTable]) -> bool:
    texts = (str(field.type) for table in tables for field in table.schema().fields)
    return any("double" in text or "float" in text for text in texts)


def _plain(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _table(target: str, version: int | None) -> DeltaTable:
    try:
        return DeltaTable(target, version=version)
    except (TableNotFoundError, DeltaError, OSError) as exc:
        if (error := access_error(exc, f"target {target!r}")) is not None:
            raise error from exc
        raise SinkUnavailable(f"target {target!r} has no readable table at version {version!r}") from exc


def _suggestion(message: str, tables: list[TableRecord]) -> str:
    """Return a hint with the table name most similar to the missing table in an error message; "" if there is none."""
    if (missing := _MISSING.search(message)) is None:
        return ""
    names = {
        **{table.topic: table.topic for table in tables},
        **{split_topic(table.topic)[1]: table.topic for table in tables},
    }
    near = get_close_matches(missing[1], names, n=1)
    return f"did you mean {names[near[0]]!r}? " if near else ""


def _table_names(tables: list[TableRecord]) -> str:
    names = sorted({*tables_by_shared_target(tables), *(table.topic for table in tables)})
    return f"correct the statement; the sink has these tables: {', '.join(names) or 'none yet'}"
