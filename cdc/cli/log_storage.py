"""`cdc log ls|compact|gc`: list the segments and runs of the log, compact the log, and remove unneeded files."""

from __future__ import annotations

import json as encoder
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import Envelope, ErrorReport, LineMark, aligned, echo, emit, json_text, line
from cdc.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from cdc.bucket_files import Root
    from cdc.catalog.commands import Command
    from cdc.config import Definition
    from cdc.log.disk_format import LogFile
    from cdc.log.reader import LogReader
    from cdc.service.log_status_records import ConsumerLine, LogStatus, SegmentLine, VacuumReport

_WAITING: Final = "of removed files are kept on disk for readers of older table versions"

FilesOption = Annotated[
    bool, typer.Option("--files", help="List the files of the log instead of its runs and segments.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Also compact the current segment, up to the log's end.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print what the command would remove, and remove nothing.")
]


def ls(config: ConfigOption = DEFAULT_CONFIG, files: FilesOption = False, json: JsonOption = False) -> None:
    """List the runs of the compacted log, and the segments of single changes."""
    from dataclasses import asdict
    from datetime import UTC, datetime

    from cdc.service.log_contents import segment_lines
    from cdc.service.log_status_reader import log_status

    definition, log = open_log(config)
    found, segments = log_status(definition.log.root, log, datetime.now(UTC), str(config)), segment_lines(log)
    summary = _summary(found)
    if json:
        every = {"files": [_file_to_json(file) for file in _by_position(log.every_file())]} if files else {}
        result = {**asdict(found), "segments": [asdict(segment) for segment in segments], **every}
        emit("log ls", json=True, summary=summary, result=result)
        return
    for text in _file_table(definition.log.root, log) if files else _segment_table(found, segments):
        echo(text)
    for text in _footer_lines(found):
        echo(text)
    emit("log ls", json=False, summary=summary)
    for problem in found.problems:
        line(LineMark.BAD, f"{problem.code} {problem.subject}: {problem.message}", fix=problem.remedy)


def compact(config: ConfigOption = DEFAULT_CONFIG, everything: AllOption = False, json: JsonOption = False) -> None:
    """Compact the closed segments to the latest state of every row.

    A running apply process does the work; if none is running, this command does it.
    """
    from cdc.catalog import Catalog
    from cdc.service.log_maintenance_requests import request_compaction, wait_for_compaction

    definition, _ = open_log(config)
    with Catalog.open(definition.catalog.url) as catalog:
        number = request_compaction(catalog, definition.name, everything=everything)
        done = None if number is None else wait_for_compaction(catalog, definition.name, number)
    if done is None:
        raise typer.Exit(_compact_in_child(config, everything=everything, json=json))
    _print_compaction(done, json=json)


def gc(config: ConfigOption = DEFAULT_CONFIG, dry_run: DryRunOption = False, json: JsonOption = False) -> None:
    """Delete the files that the log no longer needs, and request that the reader removes compacted segments.

    The reader removes a compacted segment that every consumer has read, or that is older than log.retain.max. Files of
    removed segments, and orphan files, are deleted after log.retain.grace.
    """
    from dataclasses import asdict

    from cdc.service import number_format
    from cdc.service.log_maintenance_requests import vacuum_log

    definition, _ = open_log(config)
    done = vacuum_log(definition, dry_run=dry_run)
    verb = "would remove" if dry_run else "removed"
    summary = f"{verb} {number_format.format_quantity(done.files, 'file')}, {number_format.format_size(done.bytes)}"
    emit("log gc", json=json, summary=summary, result=asdict(done))
    if not json:
        _print_trim(done)


def open_log(config: Path) -> tuple[Definition, LogReader]:
    """Load the definition and open its log; raises LogError if the log does not exist."""
    from cdc.config import load_definition
    from cdc.log.reader import LogReader

    definition = load_definition(config)
    return definition, LogReader(definition.log.root)


def _compact_in_child(config: Path, *, everything: bool, json: bool) -> int:
    import subprocess
    import sys

    options = [*(["--everything"] if everything else []), *(["--json"] if json else [])]
    command = [sys.executable, "-m", "pipelines", "compact", "-c", str(config), *options]
    # a child process: this package imports neither Spark nor the code of compaction
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE if json else None, text=True)
    if json:
        echo(json_text({**encoder.loads(done.stdout), "command": "log compact"}), flush=True)
    return done.returncode


def _print_compaction(done: Command, *, json: bool) -> None:
    outcome = done.result or {}
    error = outcome.get("error")
    if error is None:
        emit("log compact", json=json, summary=outcome.get("summary", "done"), result=outcome.get("outcome"))
        return
    if json:
        echo(Envelope(command="log compact", ok=False, summary=error["message"], error=ErrorReport(**error)))
    else:
        line(LineMark.BAD, f"{error['code']} {error['message']}", fix=error["suggestion"])
    raise typer.Exit(ExitCode.RUNTIME.value)


def _print_trim(done: VacuumReport) -> None:
    from cdc.service import number_format

    if done.trim is not None:
        what = f"{number_format.format_quantity(len(done.trim.segments), 'segment')} up to {done.trim.oldest}"
        rest = "" if done.dry_run else ": the reader removes them when it runs"
        line(LineMark.GOOD, f"{what} can be removed{rest}")
    if done.leaving_bytes:
        line(LineMark.ADVICE, f"{number_format.format_size(done.leaving_bytes)} {_WAITING}")


def retention_line(log: LogStatus) -> str:
    """Return one line about the changes that the log keeps, and about the log's slowest consumer."""
    from cdc.service import number_format

    if log.state != "read":
        return "no log yet" if log.state == "absent" else "the log cannot be read"
    weight = number_format.format_size(log.changes_bytes)
    parts = [f"{weight} in {number_format.format_quantity(log.segment_count, 'segment')}"]
    if log.oldest:
        parts.append(f"oldest change above {log.oldest}")
    size = number_format.format_size(log.compacted_bytes)
    parts.append(f"{size} compacted up to {log.horizon}" if log.horizon else "nothing is compacted yet")
    if log.slowest is not None:
        lag = lag_text(log.slowest)
        parts.append(f"slowest consumer {log.slowest.name}{f' {lag} behind' if lag else ' at the end'}")
    return " · ".join(parts)


def lag_text(consumer: ConsumerLine) -> str:
    """Return the text of a consumer's lag behind the end of the log; empty if the consumer is at the end."""
    from cdc.service import number_format

    if not consumer.behind_segments:
        return ""
    return number_format.format_lag(consumer.behind_bytes, consumer.behind_seconds)


def _summary(found: LogStatus) -> str:
    from cdc.service import number_format

    parts = [
        number_format.format_quantity(found.segment_count, "segment"),
        number_format.format_quantity(found.file_count, "file"),
        number_format.format_quantity(found.row_count, "row"),
        number_format.format_size(found.changes_bytes),
    ]
    return f"{', '.join(parts)}, up to {found.durable or 'nothing yet'}"


def _segment_table(found: LogStatus, segments: Sequence[SegmentLine]) -> list[str]:
    from cdc.service import number_format

    rows = [("", "first", "last", "files", "rows", "size", "committed (UTC)")]
    rows += [
        (
            f"run {run.run}",
            "",
            "",
            f"{run.files:,}",
            f"{run.rows:,}",
            number_format.format_size(run.bytes),
            "",
        )
        for run in found.runs
    ]
    rows += [
        (
            f"segment {one.segment}",
            one.first,
            one.last,
            f"{one.files:,}",
            f"{one.rows:,}",
            number_format.format_size(one.bytes),
            _time_range(one.began_at, one.ended_at),
        )
        for one in segments
    ]
    return aligned(rows, right={3, 4, 5}) if len(rows) > 1 else []


def _file_table(root: Root, log: LogReader) -> list[str]:
    from cdc.log.compacted_table import read_compacted_state
    from cdc.service import number_format

    compacted = read_compacted_state(root, log.log_id)
    both = [("run", file) for file in (compacted.files if compacted else ())]
    both += [("segment", file) for file in _by_position(log.every_file())]
    rows = [
        (f"{kind} {file.segment}", str(file.first), str(file.last), f"{file.rows:,}",
         number_format.format_size(file.size), file.path)
        for kind, file in both
    ]  # fmt: skip
    return aligned([("", "first", "last", "rows", "size", "file"), *rows], right={3, 4}) if rows else []


def _footer_lines(found: LogStatus) -> list[str]:
    from cdc.service import number_format

    words = []
    if found.horizon is not None:
        runs = number_format.format_quantity(len(found.runs), "run")
        size = f"{number_format.format_size(found.compacted_bytes)} in {runs}"
        oldest = f"every change above {found.oldest}" if found.oldest else "every change"
        words.append(f"compacted up to {found.horizon}: {size}; {oldest} is still a single change")
    if found.floor:
        words.append(f"tombstones up to {found.floor} are removed")
    if found.leaving_bytes:
        words.append(f"{number_format.format_size(found.leaving_bytes)} {_WAITING}")
    return words


def _time_range(began: str | None, ended: str | None) -> str:
    if began is None or ended is None:
        return ""
    first, last = began[:19].replace("T", " "), ended[:19].replace("T", " ")
    return f"{first} … {last[11:] if first[:10] == last[:10] else last}"


def _by_position(files: Iterable[LogFile]) -> list[LogFile]:
    return sorted(files, key=lambda file: (file.first, file.last))


def _file_to_json(file: LogFile) -> dict[str, Any]:
    return {
        "path": file.path,
        "segment": file.segment,
        "rows": file.rows,
        "bytes": file.size,
        "first": str(file.first),
        "last": str(file.last),
    }
