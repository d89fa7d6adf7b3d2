"""The plan of a replay: checks the options against definition, log and sink, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from cdc.config import Definition
from cdc.config.sinks import DefinedSink
from cdc.errors import ConfigError
from cdc.log import inspection
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.table import exact_glob, matches_name
from cdc.targets.published_record import Published
from cdc.targets.sink_kinds import reading_of
from cdc.verify_and_replay_options import POINT_IN_TIME_REMEDY, parse_point_in_time
from pipelines.replaying.table_sizes_in_log import TableContents, read_contents
from pipelines.sinks.record_after_batch import is_left_out

BEGINNING: Final = "beginning"
LATEST: Final = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The options of `cdc replay`."""

    sink: str
    start: str = BEGINNING
    """`beginning`, a position or an ISO 8601 time."""
    end: str = LATEST
    """`latest`, a position, which is included, or an ISO 8601 time."""
    tables: tuple[str, ...] = ()
    """Globs over `schema.table`; a name without schema means that table in any schema. Empty: all tables."""
    into: str | None = None
    """Directory for the new target; None: the new target replaces the old one."""
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """What a replay rebuilds: the sink, the tables and the end position."""

    wanted: DefinedSink
    log: LogReader
    tables: tuple[TableContents, ...]
    upto: Position
    """The position up to which the new target is built; later changes are applied afterwards."""
    published: Published | None
    """The published record of the sink; None if it has published nothing."""
    options: ReplayOptions

    @property
    def partial(self) -> bool:
        """Whether the options limit the replay to some of the sink's tables."""
        return bool(self.options.tables)

    @property
    def globs(self) -> tuple[str, ...]:
        """Globs of the tables in the new target."""
        return tuple(exact_glob(table.topic) for table in self.tables) if self.partial else self.wanted.tables


def plan_replay(definition: Definition, options: ReplayOptions) -> ReplayPlan:
    """Check the options and return the plan; raises ConfigError for an impossible sink, table, position or path."""
    wanted = next((sink for sink in definition.sinks if sink.name == options.sink), None)
    if options.sink in {delivery.name for delivery in definition.deliveries}:
        raise ConfigError(
            f"{options.sink!r} is a delivery, not a sink: its events can be sent again, but not taken back",
            remedy=f"run 'cdc deliveries rewind {options.sink} --to POSITION'",
        )
    if wanted is None:
        names = ", ".join(repr(sink.name) for sink in definition.sinks) or "none"
        raise ConfigError(f"unknown sink {options.sink!r}", remedy=f"name one of the sinks of the definition: {names}")
    # before the log is read: the sink continues meanwhile, and may publish a position that the log did not have yet
    published = reading_of(wanted).published(wanted)
    log = LogReader(definition.log_of(wanted))
    oldest, durable = _log_range(log)
    _check_start(log, options, oldest, durable)
    upto = _end_position(log, options.end, oldest, durable)
    if options.into is None:
        upto = _end_in_place(wanted, options, published, upto)
    _check_state_available(log, options, upto)
    contents, schemas = read_contents(log, upto, sink=wanted.name, globs=wanted.tables), log.schemas(upto).values()
    found = [table for table in contents if not is_left_out(table.schema, schemas)]
    tables = [table for table in found if not options.tables or matches_name(table.topic, options.tables)]
    missing = [glob for glob in options.tables if not any(matches_name(table.topic, (glob,)) for table in tables)]
    if missing or not tables:
        known = ", ".join(table.topic for table in found) or "none"
        glob = missing[0] if missing else wanted.tables[0]
        raise ConfigError(
            f"the log contains no table of sink {wanted.name!r} that matches {glob!r}",
            remedy=f"name one of the sink's tables: {known}",
        )
    _check_shared_targets(wanted, options, found, tables)
    return ReplayPlan(
        wanted=wanted, log=log, tables=tuple(tables), upto=upto, published=published, options=_normalize_path(options)
    )


def _check_shared_targets(
    wanted: DefinedSink,
    options: ReplayOptions,
    found: Sequence[TableContents],
    selected: Sequence[TableContents],
) -> None:
    """Raise ConfigError if a selected table shares its target with others, unless all of them are rebuilt in place.

    found: all tables of the sink in the log. selected: the tables to rebuild.
    """
    uris = {table.relation: wanted.shared_path(table.schema) for table in found}
    for table in selected:
        if uris[table.relation] is None:
            continue
        if options.into is not None:
            raise ConfigError(
                f"table {table.topic!r} shares its target with other tables, so --into cannot rebuild it",
                remedy="omit --into, or use --tables to name only tables with a target of their own",
            )
        sharing = {other.topic for other in found if uris.get(other.relation) == uris[table.relation]}
        if left := sorted(sharing - {other.topic for other in selected}):
            raise ConfigError(
                f"table {table.topic!r} shares its target with {left[0]!r}, so both must be rebuilt together",
                remedy=f"write {' '.join(f'--tables {topic}' for topic in sorted(sharing))}, or omit --tables",
            )


def _normalize_path(options: ReplayOptions) -> ReplayOptions:
    return options if options.into is None else replace(options, into=options.into.rstrip("/") or "/")


def _log_range(log: LogReader) -> tuple[Position, Position]:
    """Return the oldest and the newest position of the log; raises ConfigError for an empty log."""
    durable = log.durable
    files = [] if durable is None else log.files(Position(0), durable)
    if durable is None or not files:
        raise ConfigError(
            "the log is still empty: the initial snapshot has not ended",
            remedy="wait until 'cdc status' shows that the initial snapshot has ended",
        )
    return min(file.first for file in files), durable


def _check_start(log: LogReader, options: ReplayOptions, oldest: Position, durable: Position) -> None:
    if options.start == BEGINNING:
        return
    start = _parse_position(log, options.start, "--from")
    if start < oldest:
        raise ConfigError(
            f"--from {options.start} is before the log's oldest position, {oldest}",
            remedy=f"write --from {BEGINNING} or --from {oldest}",
        )
    if start > durable:
        raise ConfigError(f"--from {options.start} is after the end of the log, {durable}", remedy=POINT_IN_TIME_REMEDY)
    if start > oldest:
        raise ConfigError(
            f"sink {options.sink!r} contains one row per key: a rebuild from {start} would lose every row that did "
            f"not change after {start}",
            remedy=f"omit --from, or write --from {BEGINNING}",
        )


def _end_position(log: LogReader, text: str, oldest: Position, durable: Position) -> Position:
    if text == LATEST:
        return durable
    end = _parse_position(log, text, "--to")
    if not oldest <= end <= durable:
        raise ConfigError(
            f"--to {text} is outside the log, which contains {oldest} to {durable}", remedy=f"write --to {LATEST}"
        )
    return end


def _check_state_available(log: LogReader, options: ReplayOptions, upto: Position) -> None:
    if log.compacted is None or upto >= log.compacted.horizon:
        return
    horizon = log.compacted.horizon
    if options.end != LATEST:
        raise ConfigError(
            f"--to {options.end} is before {horizon}: the log contains only the state at {horizon}, not older states",
            remedy=f"write --to {horizon} or --to {LATEST}",
        )
    raise ConfigError(
        f"single tables cannot be rebuilt: sink {options.sink!r} is at {upto}, but the log is already compacted up to "
        f"{horizon}",
        remedy=f"wait until the apply process has applied changes up to {horizon}, or omit --tables",
    )


def _parse_position(log: LogReader, text: str, option: str) -> Position:
    """Parse a position or a time; a time becomes the last position before the first transaction committed after it."""
    point = parse_point_in_time(text, option)
    return point if isinstance(point, Position) else position_before(log, point)


def position_before(log: LogReader, time: datetime) -> Position:
    """Return the last position before the first transaction that was committed later than `time`."""
    durable = log.durable or Position(0)
    return inspection.position_at_time(log.files(Position(0), durable), durable, int(time.timestamp() * 1_000_000))


def _end_in_place(
    wanted: DefinedSink,
    options: ReplayOptions,
    published: Published | None,
    upto: Position,
) -> Position:
    if not options.tables:
        if published is not None and upto < published.position:
            raise ConfigError(
                f"sink {wanted.name!r} is at {Position(published.position)} and cannot go back to {upto}",
                remedy="write --into PATH to build a separate target",
            )
        return upto
    if wanted.has_one_target:
        raise ConfigError(
            f"sink {wanted.name!r} has one target for all tables, so it can only be rebuilt as a whole",
            remedy="omit --tables, or write --into PATH",
        )
    if published is None:
        raise ConfigError(
            f"sink {wanted.name!r} has published nothing yet, so single tables cannot be rebuilt in it",
            remedy="omit --tables, or write --into PATH",
        )
    if options.end != LATEST:
        raise ConfigError(
            f"single tables of sink {wanted.name!r} can only be rebuilt up to the position of the other tables, "
            f"{Position(published.position)}",
            remedy="omit --to, or write --into PATH",
        )
    return Position(published.position)
