"""Command `cdc log export`: writes a range of the log to files for other programs."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.log_storage import open_log
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import emit

if TYPE_CHECKING:
    from cdc.config import Definition
    from cdc.delivery.formats.printed_events import MessageFormat, PrintedMessage
    from cdc.log.export import ExportRange
    from cdc.log.reader import LogReader
    from cdc.position import Position


class ExportFormat(StrEnum):
    """File format of an export."""

    #: A file of JSON lines in cdc's own format, as `cdc tail` prints them.
    JSONL = "jsonl"
    #: A file of JSON lines in Debezium's format.
    DEBEZIUM = "debezium"
    #: A file of JSON lines with the columns of each row; fields that begin with `__` have operation, LSN and time.
    FLAT = "flat"
    #: A directory of Parquet files with the columns of the log.
    PARQUET = "parquet"


OutArgument = Annotated[
    Path, typer.Argument(help="Write to this path, which must not exist: a file, or for parquet a directory.")
]
FromOption = Annotated[str | None, typer.Option("--from", help="Begin at this position [default: the oldest change].")]
ToOption = Annotated[str | None, typer.Option("--to", help="End at this position (included) [default: the log's end].")]
ExportedTablesOption = Annotated[
    list[str] | None, typer.Option("--tables", help="Write only tables that match this glob; may be repeated.")
]
ShapeOption = Annotated[ExportFormat, typer.Option("--format", help="Write in this format.")]


def export(  # noqa: PLR0913, PLR0917 - one parameter per option
    out: OutArgument,
    first: FromOption = None,
    last: ToOption = None,
    tables: ExportedTablesOption = None,
    shape: ShapeOption = ExportFormat.JSONL,
    config: ConfigOption = DEFAULT_CONFIG,
    json: JsonOption = False,
) -> None:
    """Write single changes of the log, from --from to --to (both included), to new files.

    Lines of JSON are in commit order; writing them needs memory for a whole transaction. Rows in Parquet are in the
    order of the log's files. Without --tables the files also contain logical messages, except in the format flat.
    """
    from cdc.delivery.formats.printed_events import MessageFormat
    from cdc.log.export import export_range, write_lines, write_parquet
    from cdc.log.inspection import EVERY_ROW, rows_of_tables
    from cdc.table import matches_name

    definition, log = open_log(config)
    globs = tuple(tables or ())
    selected = rows_of_tables(lambda topic: matches_name(topic, globs)) if globs else EVERY_ROW
    asked = export_range(log, _position(first), _position(last), selected)
    if shape is ExportFormat.PARQUET:
        done = write_parquet(log, asked, out)
    else:
        form = MessageFormat.CDC if shape is ExportFormat.JSONL else MessageFormat(shape.value)
        done = write_lines(_messages(log, definition, asked, form), out)
    result = {
        "out": str(out),
        "format": shape.value,
        "after": str(asked.after),
        "upto": str(asked.upto),
        "rows": done.rows,
        "files": done.files,
        "bytes": done.size,
    }
    what = "rows" if shape is ExportFormat.PARQUET else "lines"
    summary = f"wrote {done.rows:,} {what} up to {asked.upto} to {out}, {done.size:,} bytes in {done.files:,} files"
    emit("log export", json=json, summary=summary, result=result)


def _messages(
    log: LogReader, definition: Definition, asked: ExportRange, form: MessageFormat
) -> Iterator[PrintedMessage]:
    from cdc.delivery.formats.printed_events import PrintedEvents
    from cdc.log.export import sorted_rows

    schemas = log.schemas(asked.after)
    printed = PrintedEvents(schemas, form, pipeline=definition.name, database=log.identity.database)
    for part in sorted_rows(log, asked):
        yield from printed.messages(part)


def _position(text: str | None) -> Position | None:
    from cdc.position import Position

    return None if text is None else Position.parse(text)
