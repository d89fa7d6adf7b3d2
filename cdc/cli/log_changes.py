"""`cdc log` and `cdc tail`: inspect the change log, and print changes as they arrive."""

from __future__ import annotations

import base64
import json as encoder
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli import log_damage, log_export, log_storage
from cdc.cli.log_storage import open_log
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import LineMark, echo, emit, escaped_for_terminal, json_text, line
from cdc.errors import ConfigError, LogTrimmed, MalformedPosition

if TYPE_CHECKING:
    import pyarrow as pa

    from cdc.config import Definition
    from cdc.delivery.formats.printed_events import PrintedEvents, PrintedMessage
    from cdc.log.inspection import RowSelection
    from cdc.log.reader import LogReader
    from cdc.position import Position

POLL: Final = 0.06
"""Seconds between two checks of the log for `tail -f`, equal to the default of log.commit.linger."""
DEFAULT_COUNT: Final = 20
"""Number of changes that `cdc tail` prints if neither -n nor --since is given."""

PositionArgument = Annotated[
    str | None, typer.Argument(help="Show the rows of the transaction at this position, for example 16/B374D848.")
]
TableArgument = Annotated[
    str | None,
    typer.Argument(
        help="Print changes of this table; write schema.table, or only the name to match it in every schema. "
        "* and ? match several tables. Optional with --messages."
    ),
]
MessagesOption = Annotated[
    str | None,
    typer.Option(
        "--messages",
        help="Print logical messages whose prefix matches this glob, for example 'orders.*'; '*' matches all messages.",
    ),
]
CountOption = Annotated[
    int | None, typer.Option("-n", min=0, help="Print the last N changes [default: 20, or all changes with --since].")
]
FollowOption = Annotated[
    bool, typer.Option("-f", "--follow", help="Wait for new changes, and print them as they arrive.")
]
SinceOption = Annotated[str | None, typer.Option("--since", help="Begin at this position (included) or ISO 8601 time.")]
OperationsOption = Annotated[
    str, typer.Option("--op", help="Print only these operations, for example c,u,d for inserts, updates and deletes.")
]
FormatOption = Annotated[str, typer.Option("--format", help="Print each change in this format: cdc, debezium or flat.")]


def register(app: typer.Typer) -> None:
    """Add the command group `log` and the command `tail` to the app."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Inspect, check, export and compact the change log.",
        rich_markup_mode=None,
    )
    looks = (log_storage.ls, inspect, log_damage.verify, log_export.export)
    for command in (*looks, log_storage.compact, log_storage.gc, log_damage.drop_file):
        group.command()(command)
    app.add_typer(group, name="log")
    app.command()(tail)


def inspect(position: PositionArgument = None, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Show the log's identity and its number of rows per table; with POSITION, show the rows of one transaction."""
    definition, log = open_log(config)
    if position is not None:
        _inspect_transaction(log, definition, position, json=json)
        return
    from cdc.log.inspection import count_rows

    found = count_rows(log)
    tables = {topic: operations for topic, operations in found.items() if topic}
    last = log.last_commit
    result = {
        "log_id": log.log_id,
        "system_id": log.system_id,
        "database": log.identity.database,
        "durable": _text(log.durable),
        "timeline": None if last is None else last.timeline,
        "switch_point": str(last.switch_point) if last is not None and last.switch_point else None,
        "committed_at": _time(log.committed_at(log.durable)) if log.durable is not None else None,
        "delta_version": log.version,
        "files": len(log.every_file()),
        "oldest": _text(log.oldest or None),
        "tables": tables,
    }
    summary = f"log {log.log_id} of {log.identity.database!r} at {log.durable}"
    if json:
        emit("log inspect", json=True, summary=summary, result=result)
        return
    for name, value in result.items():
        if name != "tables":
            echo(f"{name + ':':15}{value}")
    for topic, operations in tables.items():
        echo(f"  {escaped_for_terminal(topic)}:", "  ".join(f"{op} {count:,}" for op, count in operations.items()))


def tail(  # noqa: PLR0913, PLR0917 - one parameter per option
    table: TableArgument = None,
    count: CountOption = None,
    follow: FollowOption = False,
    since: SinceOption = None,
    messages: MessagesOption = None,
    op: OperationsOption = "",
    form: FormatOption = "cdc",
    config: ConfigOption = DEFAULT_CONFIG,
    json: JsonOption = False,
) -> None:
    """Print the changes of tables, or logical messages, in log order, newest last.

    With --format debezium or flat, or with --json and -f, the command prints each change as one line of JSON.
    --json without -f prints one envelope with all changes. In the format cdc, integers and booleans have their JSON
    type; every other value is the text that Postgres sent. The formats debezium and flat are those of a delivery.

    A log that an older version wrote has messages without a prefix; --messages '*' prints them too. The format flat has
    no messages.
    """
    if table is None and messages is None:
        raise ConfigError(
            "'cdc tail' needs a table, or --messages",
            remedy="name a table as schema.table, or write --messages '*' for logical messages",
        )
    printer = _Printer(form, op, json=json, follow=follow)
    definition, log = open_log(config)
    view = _LogMessages(log, definition, _row_selection(table, messages), printer)
    start = parse_since(log, since)
    if count is None:
        count = DEFAULT_COUNT if start is None else -1
    rows = view.newest(count, printer.operations) if start is None else view.since(*start)
    if not rows.num_rows and table is not None:
        _check_table_exists(log, table)
    events = view.events_after(rows)
    printed = printer.show(events.messages(rows, printer.operations), count)
    if not printed and count and not json:
        reason, fix = _why_nothing(log, "messages" if table is None else "changes")
        line(LineMark.ADVICE, reason, fix=fix, to=sys.stderr)
    seen = log.durable
    while follow:
        time.sleep(POLL)
        log.refresh()
        if log.durable is not None and log.durable != seen:
            from cdc.position import Position

            for part in view.parts(seen or Position(0), log.durable):
                printer.show(events.messages(part, printer.operations), -1)
            seen = log.durable


class _LogMessages:
    """Reads selected rows from a log, and converts rows to messages in the format of a printer."""

    def __init__(self, log: LogReader, definition: Definition, selected: RowSelection, printer: _Printer) -> None:
        self._log = log
        self._selected = selected
        self._printer = printer
        self._pipeline = definition.name

    def newest(self, count: int, operations: frozenset[str]) -> pa.Table:
        """Return the last rows of the log, in log order.

        At least `count` of them have one of `operations`, unless the log has fewer such rows. Rows with other
        operations are returned but not counted. If `operations` is empty, every row is counted.
        """
        from cdc.log.inspection import newest_rows

        return newest_rows(self._log, self._selected, count, operations)

    def since(self, after: Position, earliest: datetime | None) -> pa.Table:
        """Return the rows after a position that were committed at `earliest` or later, sorted in log order."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found = list(self.parts(after, self._log.durable or after))
        rows = pa.concat_tables(found) if found else pa.table({})
        if earliest is None or not rows.num_rows:
            return rows
        return rows.filter(pc.greater_equal(rows["committed_at"], pa.scalar(earliest, pa.timestamp("us", tz="UTC"))))

    def parts(self, after: Position, upto: Position) -> Iterator[pa.Table]:
        """Yield the sorted rows in (after, upto], a few files at a time; raises LogTrimmed if some are trimmed."""
        from cdc.log.inspection import rows_between

        _check_not_trimmed(self._log, after)
        return rows_between(self._log, self._selected, after, upto)

    def events_after(self, rows: pa.Table) -> PrintedEvents:
        """Return what converts rows to messages, with the schemas at the first row; the newest if there are no rows."""
        from cdc.delivery.formats.printed_events import PrintedEvents
        from cdc.position import Position

        schemas = self._log.schemas(Position(rows["position"][0].as_py()) if rows.num_rows else None)
        return PrintedEvents(schemas, self._printer.form, pipeline=self._pipeline, database=self._log.identity.database)


class _Printer:
    """Printer of messages: as lines for people, as JSON lines, or in one JSON envelope."""

    def __init__(self, form: str, operations: str, *, json: bool, follow: bool) -> None:
        from cdc.delivery.formats.printed_events import MessageFormat
        from cdc.log_row import Operation

        if form not in tuple(MessageFormat):
            raise ConfigError(
                f"unknown format {form!r}", remedy=f"write --format with one of {', '.join(MessageFormat)}"
            )
        self.form = MessageFormat(form)
        self.operations = frozenset(part.strip() for part in operations.split(",") if part.strip())
        if unknown := self.operations - {member.value for member in Operation}:
            known = ", ".join(f"{member.value} {member.name.lower()}" for member in Operation)
            raise ConfigError(
                f"unknown operation {min(unknown)!r}", remedy=f"write --op with one or more of these letters: {known}"
            )
        self._envelope = json and not follow
        self._people = self.form is MessageFormat.CDC and not json

    def show(self, found: Iterator[PrintedMessage], count: int) -> int:
        """Print the last `count` messages, or all of them if `count` is -1; return how many were printed."""
        wanted = deque(found, maxlen=None if count < 0 else count)
        if self._envelope:
            emit("tail", json=True, summary=f"{len(wanted):,} changes", result={"changes": list(wanted)})
            return len(wanted)
        for message in wanted:
            echo(_line(message) if self._people else json_text(message))
        if wanted:
            echo(end="", flush=True)
        return len(wanted)


def _line(message: PrintedMessage) -> str:
    prefix = f"{message['position']}#{message['ordinal']}"
    parts = [f"{prefix:20}", message["committed_at"], message["op"], message["topic"] or ""]
    if "schema" in message:
        return " ".join([*parts, "columns", ", ".join(c["name"] for c in message["schema"]["columns"])])
    if "payload" in message:
        return escaped_for_terminal(" ".join([*parts, *_message_fields(message)]))
    # the key is shown where the image does not repeat it
    names = ("old_key", *(() if message.get("after") else ("key",)), "before", "after", "unchanged", "older_than")
    parts += [f"{name}={encoder.dumps(message[name], ensure_ascii=False)}" for name in names if name in message]
    return escaped_for_terminal(" ".join(parts))


def _message_fields(message: PrintedMessage) -> Iterator[str]:
    """Yield the fields of a logical message; a content that is not UTF-8 is shown as base64, by the name `payload`."""
    for name in ("prefix", "transactional", "lsn"):
        yield f"{name}={encoder.dumps(message[name], ensure_ascii=False)}"
    try:
        content = base64.b64decode(message["payload"]).decode()
        yield f"content={encoder.dumps(content, ensure_ascii=False)}"
    except UnicodeDecodeError:
        yield f"payload={message['payload']}"


def _inspect_transaction(log: LogReader, definition: Definition, position: str, *, json: bool) -> None:
    from cdc.delivery.formats.printed_events import MessageFormat
    from cdc.log.inspection import EVERY_ROW, transaction
    from cdc.position import Position

    wanted = Position.parse(position)
    _check_not_trimmed(log, Position(max(0, wanted - 1)))
    rows = transaction(log, wanted)
    if not rows.num_rows:
        raise ConfigError(
            f"the log has no rows at position {position!r}", remedy="run 'cdc tail' to see positions that have rows"
        )
    view = _LogMessages(log, definition, EVERY_ROW, _Printer(MessageFormat.CDC.value, "", json=json, follow=False))
    found = list(view.events_after(rows).messages(rows))
    xid, time_text = found[0]["xid"], found[0]["committed_at"]
    summary = f"{len(found):,} rows of transaction {xid} at {wanted}, committed {time_text}"
    if found[0].get("transactional") is False:
        summary = f"a message outside transactions at {wanted}, sent {time_text}"
    if json:
        emit("log inspect", json=True, summary=summary, result={"position": str(wanted), "changes": found})
        return
    for message in found:
        echo(_line(message))
    echo(summary)


def _check_table_exists(log: LogReader, glob: str) -> None:
    """Raise ConfigError if no table of the log matches the glob."""
    from difflib import get_close_matches

    topics = sorted({schema.topic for schema in log.schemas().values()})
    if any(map(_topic_filter(glob), topics)):
        return
    names = {topic.partition(".")[2]: topic for topic in topics} | {topic: topic for topic in topics}
    near = get_close_matches(glob, names, n=1)
    fix = f"did you mean {names[near[0]]!r}? " if near else ""
    raise ConfigError(f"the log has no table {glob!r}", remedy=f"{fix}run 'cdc tables ls' to see the tables")


def _row_selection(table: str | None, messages: str | None) -> RowSelection:
    """Return the rows of the tables that match `table`, and the messages whose prefix matches `messages`."""
    from cdc.log.inspection import RowSelection

    return RowSelection(
        topics=(lambda _topic: False) if table is None else _topic_filter(table),
        prefixes=lambda prefix: messages is not None and fnmatchcase(prefix, messages),
    )


def _topic_filter(glob: str) -> Callable[[str], bool]:
    from cdc.table import matches_name

    return lambda topic: matches_name(topic, (glob,))


def parse_since(log: LogReader, text: str | None) -> tuple[Position, datetime | None] | None:
    """Parse --since; return the position after which rows are printed, and the earliest commit time of the rows.

    The time is None if --since is a position. The result is None without --since.
    """
    if text is None:
        return None
    from cdc.log.inspection import approximate_position_at
    from cdc.position import Position

    try:
        return Position(max(0, Position.parse(text) - 1)), None
    except MalformedPosition:
        pass
    except ValueError as error:  # an epoch with a malformed LSN
        if "/" in text:
            raise ConfigError(f"malformed position {text!r}", remedy="write the position as 16/B374D848") from error
    try:
        since = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"malformed --since {text!r}", remedy="write a position as 16/B374D848 or a time as 2026-01-31T12:00:00Z"
        ) from error
    since = since if since.tzinfo else since.replace(tzinfo=UTC)
    if log.oldest and since < (earliest := _oldest_commit_time(log)):
        raise LogTrimmed(
            f"--since is too early: changes up to {log.oldest!s} are trimmed, so the log begins at "
            f"{earliest.isoformat()}",
            remedy=f"write --since {earliest.isoformat()} or later",
        )
    return approximate_position_at(log, since), since


def _oldest_commit_time(log: LogReader) -> datetime:
    """Return the commit time of the oldest change that is not trimmed."""
    import pyarrow.compute as pc

    from cdc.log.reader import read_file

    first = min(log.every_file(), key=lambda file: file.first)  # the newest segment is never trimmed
    found: datetime = pc.min(read_file(first, log.oldest, first.last, ["committed_at"])["committed_at"]).as_py()
    return found


def _why_nothing(log: LogReader, kind: str) -> tuple[str, str]:
    """Return why a log has no changes to print, and what to do. kind: `changes` or `messages`."""
    if not log.oldest:
        return f"the log has no such {kind} yet", "write -f to wait for them"
    return (
        f"the log has no such {kind} after {log.oldest}: single changes up to there are compacted",
        "write -f to wait for new ones, or run 'cdc query' to see the rows of a table",
    )


def _check_not_trimmed(log: LogReader, after: Position) -> None:
    if after < log.oldest:
        raise LogTrimmed(
            f"single changes up to {log.oldest!s} are trimmed, and the log keeps only their compacted state",
            remedy=f"choose a position after {log.oldest!s}",
        )


def _text(position: Position | None) -> str | None:
    return None if position is None else str(position)


def _time(micros: int) -> str | None:
    return datetime.fromtimestamp(micros / 1e6, UTC).isoformat() if micros else None
