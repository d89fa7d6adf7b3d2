"""Lists what a log contains: tables, segments, files, and single transactions without row values.

Importing this module takes a second and 90 MB, because the import loads the code that reads the log. The server
therefore imports the module with the first request that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from cdc.bucket_files import Root, as_root
from cdc.errors import LogError, UnknownName
from cdc.log.compacted_table import read_compacted_state
from cdc.log.disk_format import CHANGES, LogFile
from cdc.log.inspection import SegmentListing, SegmentSummary, outline
from cdc.log.json_output_formats import SchemaInForce, messages
from cdc.log.reader import LogReader
from cdc.log.table_io import is_table
from cdc.position import Position
from cdc.service.log_status_records import FileLine, SegmentLine, Transaction
from cdc.table import TableSchema, TableState

_NOT_READ: Final = {"before": None, "after": None, "partial": False}


def open_log(root: str | Root, log: LogReader | None = None) -> LogReader:
    """Return a LogReader that is at the end of the log under `root`.

    If `log` is given, refresh and return it. If `log` is None, or if its table no longer exists, open a new reader.
    Raises LogError if there is no log.
    """
    if log is None or not is_table(as_root(root) / CHANGES):  # an open reader does not notice that its log is gone
        return LogReader(root)
    log.refresh()
    return log


def tables_by_topic(log: str | Root) -> dict[str, TableSchema]:
    """Return the schema of each table in the log, by topic; empty if there is no log.

    A dropped table is included only if no existing table has the same name. A table that the definition no longer
    includes is left out.
    """
    try:
        schemas = LogReader(log).schemas().values()
    except LogError:
        return {}  # the first copy has not begun
    ordered = sorted(schemas, key=lambda schema: schema.state is not TableState.DROPPED)
    return {schema.topic: schema for schema in ordered if not schema.removed}


def segment_lines(log: LogReader) -> list[SegmentLine]:
    """Return all segments of the log, oldest first."""
    return [segment_line(segment) for segment in SegmentListing(log).segments()]


def segment_line(segment: SegmentSummary) -> SegmentLine:
    """Convert the summary of a segment to the line that commands and API show."""
    return SegmentLine(
        segment=segment.segment,
        files=segment.files,
        rows=segment.rows,
        bytes=segment.size,
        first=str(segment.first),
        last=str(segment.last),
        began_at=None if segment.began_at is None else segment.began_at.isoformat(),
        ended_at=None if segment.ended_at is None else segment.ended_at.isoformat(),
    )


def files_of_segment(log: LogReader, segment: int) -> list[FileLine]:
    """Return the files of one segment in order of position. Raises UnknownName if the segment does not exist."""
    found = [file for file in log.every_file() if file.segment == segment]
    if not found:
        raise UnknownName(f"the log has no segment {segment}", remedy="choose a segment that 'cdc log ls' prints")
    return _file_lines(found)


def files_of_run(root: str | Root, log: LogReader, run: int) -> list[FileLine]:
    """Return the files of one run of the compacted log. Raises UnknownName if the run does not exist."""
    compacted = read_compacted_state(root, log.log_id)
    found = next((each for each in (compacted.runs if compacted else ()) if each.number == run), None)
    if found is None:
        raise UnknownName(f"the compacted log has no run {run}", remedy="choose a run that 'cdc log ls' prints")
    return _file_lines(found.files)


def read_transaction(log: LogReader, text: str, most: int) -> Transaction:
    """Return the transaction at a position; the result lists up to `most` of its first rows.

    Raises MalformedPosition if the text is no position. Raises UnknownName if the log has no transaction at the
    position, or if the single changes at this position were trimmed.
    """
    position = Position.parse(text)
    if position <= log.oldest:
        raise UnknownName(
            f"the log cannot show the transaction: single changes up to {log.oldest!s} are trimmed",
            remedy=f"choose a position after {log.oldest!s}",
        )
    found, count = outline(log, position, most)
    if not count:
        raise UnknownName(
            f"the log has no rows at position {text!r}", remedy="run 'cdc tail' to see positions that have rows"
        )
    rows: list[dict[str, Any]] = [row | _NOT_READ for row in found.to_pylist()]
    shown = messages(rows, SchemaInForce(log.schemas(position)))
    return Transaction(position=str(position), rows=count, changes=[message for _, message in shown])


def _file_lines(files: Sequence[LogFile]) -> list[FileLine]:
    ordered = sorted(files, key=lambda file: (file.first, file.last))
    return [
        FileLine(path=file.path, rows=file.rows, bytes=file.size, first=str(file.first), last=str(file.last))
        for file in ordered
    ]
