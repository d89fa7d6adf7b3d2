"""`cdc backfill`: read rows of the source again while the stream runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import LineMark, echo, emit, line
from cdc.errors import CdcError, ConfigError, ExitCode, all_error_classes

if TYPE_CHECKING:
    from pathlib import Path

    from cdc.catalog import Catalog
    from cdc.snapshot.backfill_documents import BackfillRequest
    from cdc.snapshot.backfill_status import BackfillStatus

TablesArgument = Annotated[
    list[str],
    typer.Argument(help="Select these tables; write schema.table, where * and ? are wildcards.", metavar="TABLE…"),
]
JobArgument = Annotated[
    int,
    typer.Argument(
        min=1,
        max=(1 << 63) - 1,
        help="Select the backfill with this number; `cdc backfill ls` prints the numbers.",
        metavar="ID",
    ),
]
WhereOption = Annotated[
    str | None,
    typer.Option(
        help="Read only rows that match this SQL condition; the source evaluates it in a read-only transaction."
    ),
]
KeysOption = Annotated[
    str | None,
    typer.Option(
        metavar="FROM..TO",
        help="Read only rows with keys from FROM to TO (both included). You may omit FROM or TO; "
        "write a composite key as a,b. Put a value with a comma or with two dots in double quotes.",
    ),
]
KeyOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Read only the row with this key; may be repeated. Write a composite key as a,b. Put a value with a "
        'comma in double quotes: "a,b".',
    ),
]
KeysFromOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Read only rows with the keys in this file, one key per line in the form of --key; "
        "'-' means standard input.",
    ),
]
SinkOption = Annotated[str | None, typer.Option(help="Write the rows to this sink only.")]
WaitOption = Annotated[
    bool,
    typer.Option("--wait", help="Wait until the backfill ends, without a time limit; exit with status 1 if it failed."),
]
RateOption = Annotated[
    int | None, typer.Option(min=1, help="Read at most this many rows per second [default: no limit].")
]
_NO_READER = frozenset({"missing", "stopped", "failed", "stale", "copied"})
"""Reader states in which no reader process runs; a requested backfill then waits until a reader is started."""


class DefaultsToStart(TyperGroup):
    """Command group in which `cdc backfill TABLE` means `cdc backfill start TABLE`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve the command `start` if the first argument names no command; that argument is then a table to read."""
        if args and args[0] not in self.commands:
            args = ["start", *args]
        return super().resolve_command(ctx, args)


def register(app: typer.Typer) -> None:
    """Add the command group `backfill` to the app."""
    group = typer.Typer(
        cls=DefaultsToStart,
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Read rows of the source again while the stream runs. `cdc backfill TABLE` starts a backfill.",
    )
    for command in (start, ls, show, pause, resume, cancel):
        group.command()(command)
    app.add_typer(group, name="backfill")


def start(  # noqa: PLR0913, PLR0917 - one parameter per option
    tables: TablesArgument,
    where: WhereOption = None,
    keys: KeysOption = None,
    key: KeyOption = None,
    keys_from: KeysFromOption = None,
    sink: SinkOption = None,
    rate: RateOption = None,
    wait: WaitOption = False,
    config: ConfigOption = DEFAULT_CONFIG,
    json: JsonOption = False,
) -> None:
    """Request that the running reader reads rows of the source again and merges them into the stream.

    With --key or --keys-from, the sinks delete each given key that the source no longer has. With --keys or
    --where, the sinks keep rows that the source no longer has; `cdc tables resync` deletes such rows.
    """
    from cdc.snapshot.backfill_documents import BackfillRequest

    first, last = _parse_key_range(keys)
    listed = _parse_keys(key, keys_from)
    request = BackfillRequest(tuple(tables), where=where, first=first, last=last, sink=sink, rate=rate, keys=listed)
    submit_backfill(request, command="backfill", config=config, wait=wait, json=json)


def ls(config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """List the backfills, newest first."""
    from cdc.catalog import Catalog
    from cdc.config import load_definition
    from cdc.snapshot.backfill_status import list_backfills

    definition = load_definition(config)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        statuses = list_backfills(catalog, definition.name, ended=100)
    summary = f"{len(statuses)} backfills"
    if json:
        emit("backfill ls", json=True, summary=summary, result={"backfills": [_to_json(one) for one in statuses]})
        return
    for one in statuses:
        echo(_line(one))
    emit("backfill ls", json=False, summary=summary)


def show(job: JobArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Show the progress of a backfill, table by table."""
    from cdc.catalog import Catalog
    from cdc.config import load_definition
    from cdc.snapshot.backfill_status import find_backfill, progress_text

    definition = load_definition(config)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        status = find_backfill(catalog, definition.name, job)
    if json:
        emit("backfill show", json=True, summary=_line(status).strip(), result=_to_json(status))
        return
    echo(_line(status))
    for topic, done in status.tables.items():
        echo(f"  {topic:<40}{done.state:<14}{progress_text(done)}")
    if status.error is not None:
        line(LineMark.BAD, f"{status.error['code']} {status.error['message']}", fix=status.error["suggestion"])


def pause(job: JobArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Pause a backfill after its current chunk."""
    _send_action(job, "pause", config=config, json=json)


def resume(job: JobArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Resume a paused backfill."""
    _send_action(job, "resume", config=config, json=json)


def cancel(job: JobArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Cancel a backfill after its current chunk; the rows that it has already read stay in the log and the sinks."""
    _send_action(job, "cancel", config=config, json=json)


def submit_backfill(request: BackfillRequest, *, command: str, config: Path, wait: bool, json: bool) -> None:
    """Request a backfill or a resync and print its state; if the job has failed, raise the error of the job."""
    from dataclasses import asdict
    from getpass import getuser

    from cdc.catalog import Catalog
    from cdc.config import load_definition
    from cdc.snapshot.reader_commands import OUTCOME_WITHIN, request_backfill, wait_for_backfill

    definition = load_definition(config)
    with Catalog.open(definition.catalog.url) as catalog:
        job = request_backfill(definition, catalog, request, getuser())
        reader = reader_state(catalog, definition.name)
        timeout = None if wait else OUTCOME_WITHIN if reader == "running" else 0.0
        status = wait_for_backfill(catalog, definition.name, job.id, timeout)
    if status.error is not None:
        raise _failed_backfill(job.id, status.error)
    summary, mark = _outcome_line(job.id, len(job.tables), status, reader)
    if json:
        result = {"id": job.id, "tables": list(job.tables), "reader": reader}
        progress = {name: value for name, value in asdict(status).items() if name in {"state", "rows"}}
        emit(command, json=True, summary=summary, result=result | progress, ok=mark is not LineMark.BAD)
    else:
        line(mark, summary, fix=f"cdc backfill show {job.id} -c {config}")
    if mark is LineMark.BAD:
        raise typer.Exit(ExitCode.RUNTIME.value)


def reader_state(catalog: Catalog, pipeline: str) -> str:
    """Return the state of the pipeline's reader: `running` if it executes commands now, or `missing`, `stopped` …"""
    from datetime import UTC, datetime

    from cdc.service.status import pipeline_status

    processes = pipeline_status(catalog, pipeline, datetime.now(UTC)).processes
    return next((found.state for found in processes if found.process == "reader"), "missing")


def _outcome_line(job: int, tables: int, status: BackfillStatus, reader: str) -> tuple[str, LineMark]:
    """Return the line that describes the state of a requested backfill, and the symbol in front of the line."""
    named = f"backfill {job}: {tables} tables"
    if status.state == "done":
        return f"{named}, done, {status.rows:,} rows", LineMark.GOOD
    if not status.pending:
        return f"{named}, {status.state}", LineMark.BAD
    if reader != "running":
        begins = (
            "the backfill starts when a reader runs"
            if reader in _NO_READER
            else "the backfill starts when the reader runs"
        )
        is_away = "no reader is running" if reader in _NO_READER else f"the reader is {reader}"
        return f"{named}, queued; {is_away}: {begins}", LineMark.ADVICE
    if status.state == "queued":
        return (
            f"{named}, queued; the running reader runs one backfill at a time and has not started this one",
            LineMark.ADVICE,
        )
    return f"{named}, accepted by the running reader", LineMark.GOOD


def _failed_backfill(job: int, error: dict[str, str]) -> CdcError:
    """Return the stored error of a failed backfill as an exception of the class that has the error's code."""
    kinds = {kind.code: kind for kind in all_error_classes()}
    kind = kinds.get(error["code"], CdcError)
    return kind(f"backfill {job} failed: {error['message']}", remedy=error["suggestion"])


def _send_action(job: int, verb: str, *, config: Path, json: bool) -> None:
    from getpass import getuser

    from cdc.catalog import Catalog
    from cdc.config import load_definition
    from cdc.snapshot.backfill_documents import BackfillAction
    from cdc.snapshot.reader_commands import send_action

    definition = load_definition(config)
    with Catalog.open(definition.catalog.url) as catalog:
        send_action(catalog, definition.name, job, BackfillAction(verb), getuser())
        reader = reader_state(catalog, definition.name)
    later = "" if reader == "running" else f"; the reader is {reader}: the request takes effect when the reader runs"
    summary = f"requested to {verb} backfill {job}{later}"
    emit(f"backfill {verb}", json=json, summary=summary, result={"id": job, "reader": reader})


def _to_json(status: BackfillStatus) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(status)


def _line(status: BackfillStatus) -> str:
    from cdc.snapshot.backfill_status import progress_text, tables_text

    what = tables_text(status.request) + (f" into {status.request.sink}" if status.request.sink else "")
    return f"{status.id:>4}  {status.kind:<9}{status.state:<14}{what}  {progress_text(status)}".rstrip()


def _parse_keys(keys: list[str] | None, file: str | None) -> tuple[tuple[str, ...], ...] | None:
    """Return the keys of --key and --keys-from without duplicates; None if neither option was given."""
    if keys is None and file is None:
        return None
    import sys
    from contextlib import nullcontext
    from pathlib import Path

    from cdc.snapshot.backfill_documents import parse_keys

    found = [key for text in keys or () for key in parse_keys([text], f"--key {text!r}")]
    if file is not None:
        try:
            with nullcontext(sys.stdin) if file == "-" else Path(file).open(encoding="utf-8-sig", newline="") as lines:
                found += parse_keys(lines, repr(file))
        except OSError as exc:
            raise ConfigError(
                f"cannot read the keys in {file!r}: {exc}", remedy="name a readable file with --keys-from"
            ) from exc
        except UnicodeDecodeError as exc:
            raise ConfigError(f"the keys in {file!r} are not UTF-8: {exc}", remedy="convert the file to UTF-8") from exc
    return tuple(dict.fromkeys(found))


def _parse_key_range(keys: str | None) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    from cdc.snapshot.backfill_documents import parse_key_range

    return (None, None) if keys is None else parse_key_range(keys)
