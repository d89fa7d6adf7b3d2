"""`cdc tables`: list, add, remove or skip the tables of a pipeline, or copy them again (resync)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.backfill import RateOption, TablesArgument, WaitOption, reader_state, submit_backfill
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import LineMark, echo, echo_source, emit, line
from cdc.errors import CdcError, ExitCode

if TYPE_CHECKING:
    from cdc.catalog import Catalog
    from cdc.catalog.commands import Command
    from cdc.config import Definition
    from cdc.config.yaml_edit import YamlEdit
    from cdc.service.table_status import TableLine

DryOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the change of the definition file, but do not write the file.")
]
WATCH = "cdc tables ls -c {}"
READER_NOT_RUNNING = "no reader is running: the next reader applies the rules when it starts"


def register(app: typer.Typer) -> None:
    """Add the command group `tables` to the app."""
    group = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, help="List, add, remove or resync the tables of the pipeline."
    )
    for command in (ls, add, remove, resync, skip):
        group.command()(command)
    app.add_typer(group, name="tables")


def ls(config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """List each table with its number in the log, its capture state, its copied rows, and its state in each sink."""
    from dataclasses import asdict
    from datetime import UTC, datetime

    from cdc.catalog import Catalog
    from cdc.config import load_definition
    from cdc.service.defined_pipeline import DefinedPipeline
    from cdc.service.log_contents import tables_by_topic
    from cdc.service.status import pipeline_status
    from cdc.service.table_status import table_lines

    definition = load_definition(config)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        status = pipeline_status(
            catalog, definition.name, datetime.now(UTC), defined=DefinedPipeline.of(definition, str(config))
        )
    tables = table_lines(status.tables, tables_by_topic(definition.log.root))
    summary = f"{len(tables)} tables"
    if json:
        emit("tables ls", json=True, summary=summary, result={"tables": [asdict(table) for table in tables]})
        return
    for table in tables:
        _print(table, str(config))
    emit("tables ls", json=False, summary=summary)


def resync(
    tables: TablesArgument,
    rate: RateOption = None,
    wait: WaitOption = False,
    config: ConfigOption = DEFAULT_CONFIG,
    json: JsonOption = False,
) -> None:
    """Copy whole tables again while the stream runs.

    The copy also deletes from every sink the rows whose deletion was not captured, and it removes a needs_resync mark.
    """
    from cdc.snapshot.backfill_documents import BackfillRequest

    request = BackfillRequest(tuple(tables), rate=rate, resync=True)
    submit_backfill(request, command="tables resync", config=config, wait=wait, json=json)


def add(
    tables: TablesArgument,
    dry_run: DryOption = False,
    config: ConfigOption = DEFAULT_CONFIG,
    json: JsonOption = False,
) -> None:
    """Add a rule for each table to the definition; the running reader then publishes and copies the table.

    The command keeps comments and layout of the file. A glob also matches tables that are created later.
    """
    from cdc.config.yaml_edit import add_tables

    _edit("tables add", add_tables(config, tables), tables, dry_run=dry_run, json=json)


def remove(
    tables: TablesArgument,
    dry_run: DryOption = False,
    config: ConfigOption = DEFAULT_CONFIG,
    json: JsonOption = False,
) -> None:
    """Remove the rule of each table from the definition, or add the table to 'exclude' if another rule matches it.

    The running reader then stops capturing the tables. Their rows stay in the log and in the sinks.
    """
    from cdc.config.yaml_edit import remove_tables

    _edit("tables remove", remove_tables(config, tables), tables, dry_run=dry_run, json=json)


def skip(tables: TablesArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Mark tables as complete without copying them; rows that are missing in a sink stay missing.

    The command removes a needs_resync mark, or ends a first copy that failed.
    """
    from getpass import getuser

    from cdc.catalog import Catalog
    from cdc.config import load_definition
    from cdc.snapshot.reader_commands import request_skip

    definition = load_definition(config)
    with Catalog.open(definition.catalog.url) as catalog:
        job, topics = request_skip(definition, catalog, tables, getuser())
        answer = _wait_for_answer(catalog, definition.name, job)
    result: dict[str, Any] = {"id": job, "tables": topics, "reader": _result_of(answer)}
    failed = (_result_of(answer) or {}).get("error")
    named = ", ".join(topics)
    ok = failed is None
    if json:
        emit(
            "tables skip",
            json=True,
            summary=f"{'skipped' if answer else 'requested to skip'} {named}",
            result=result,
            ok=ok,
        )
    elif failed is not None:
        line(LineMark.BAD, f"{failed['code']} {failed['message']}", fix=failed["suggestion"])
    elif answer is None:
        line(
            LineMark.ADVICE, f"requested to skip {named}; the reader has not confirmed it yet", fix=WATCH.format(config)
        )
    else:
        line(LineMark.GOOD, f"{named}: marked live without a copy", fix=WATCH.format(config))
    if not ok:
        raise typer.Exit(ExitCode.FINDING.value)


def _edit(command: str, edit: YamlEdit, tables: list[str], *, dry_run: bool, json: bool) -> None:
    """Write the edited definition, make the running reader reload its rules, and print the result.

    With `dry_run`, or if the edit changes nothing, only print the change.
    """
    from cdc.config.yaml_edit import write_edit

    definition, changes = edit.definition, list(edit.done)
    absent = _missing_at_source(definition, tables) if command == "tables add" else []
    result: dict[str, Any] = {"tables": tables, "changes": changes, "diff": edit.diff, "absent": absent}
    if dry_run or not edit.changes:
        summary = (
            "nothing to do: the rules of the definition already have this effect"
            if not edit.changes
            else "would change the definition"
        )
        refused = {} if dry_run or command != "tables add" else _refused_now(definition, tables)
        if not json and edit.diff:
            echo_source(edit.diff, end="")
        if not json:
            _warn_missing(absent)
            _print_answer(None, refused, None, watch="")
        result |= {"written": False, "reader": None, "refused": refused}
        emit(command, json=json, summary=summary, result=result, ok=not refused)
        if refused:
            raise typer.Exit(ExitCode.FINDING.value)
        return
    write_edit(edit)
    answer, trouble = _reload_rules(command, definition, tables)
    outcome = _result_of(answer)
    refused = _refused(outcome, tables)
    summary = f"{edit.path}: {'; '.join(changes)}"
    ok = not refused
    if json:
        emit(command, json=True, summary=summary, result={**result, "written": True, "reader": outcome}, ok=ok)
    else:
        line(LineMark.GOOD, summary)
        _warn_missing(absent)
        _print_answer(outcome, refused, trouble, watch=WATCH.format(edit.path))
    if not ok:
        raise typer.Exit(ExitCode.FINDING.value)


def _refused_now(definition: Definition, tables: list[str]) -> dict[str, str]:
    """Return table → reason for the tables that match `tables` and that the reader refuses to capture.

    The answer comes from the running reader, or else from the catalog. It is empty if the catalog cannot be read.
    """
    from cdc.catalog import REFUSED, Catalog
    from cdc.snapshot.reader_commands import request_table_check
    from cdc.table import matches

    try:
        with Catalog.open(definition.catalog.url) as catalog:
            if _is_reader_running(catalog, definition.name):
                answer = _wait_for_answer(catalog, definition.name, request_table_check(catalog, definition.name))
                if answer is not None:
                    return _refused(_result_of(answer), tables)
            known = [table for table in catalog.tables.ls(definition.name) if table.state == REFUSED]
    except CdcError:
        return {}  # the command succeeds without the reader: the definition already has the rule
    return {table.topic: table.reason or "" for table in known if matches(table.topic, tables)}


def _reload_rules(command: str, definition: Definition, tables: list[str]) -> tuple[Command | None, str | None]:
    """Make the running reader reload its rules, and return (finished command, None).

    If no reader runs, or if it does not answer, return (None, reason).
    """
    from getpass import getuser

    from cdc.catalog import Catalog
    from cdc.snapshot.reader_commands import request_table_check

    try:
        with Catalog.open(definition.catalog.url) as catalog:
            catalog.audit.write(getuser(), command, definition.name, {"tables": tables})
            if not _is_reader_running(catalog, definition.name):
                return None, READER_NOT_RUNNING
            answer = _wait_for_answer(catalog, definition.name, request_table_check(catalog, definition.name))
    except CdcError as error:
        return (
            None,
            f"cannot notify the reader: {error.message}; a running reader reloads the definition within 30 seconds",
        )
    return answer, None if answer else "the reader has not answered yet; it may be waiting for open transactions"


def _wait_for_answer(catalog: Catalog, pipeline: str, job: int) -> Command | None:
    """Wait until the reader has finished command `job`, and return it; None if no reader finishes it in time."""
    from cdc.snapshot.reader_commands import wait_for_answer

    return wait_for_answer(catalog, job) if _is_reader_running(catalog, pipeline) else None


def _is_reader_running(catalog: Catalog, pipeline: str) -> bool:
    return reader_state(catalog, pipeline) == "running"


def _missing_at_source(definition: Definition, tables: list[str]) -> list[str]:
    """Return the tables that do not exist at the source; empty if the source cannot be reached."""
    from cdc.postgres.connection import connect
    from cdc.postgres.tables import match_tables

    try:
        with connect(definition.source.current_dsn(), application_name="cdc tables") as conn:
            return [table for table in tables if not match_tables(conn, [table])]
    except CdcError:
        return []


def _warn_missing(absent: list[str]) -> None:
    for table in absent:
        line(
            LineMark.ADVICE,
            f"the source has no table {table}",
            fix="create the table at the source; the reader then captures it",
        )


def _result_of(answer: Command | None) -> dict[str, Any] | None:
    return None if answer is None else answer.result


def _refused(outcome: dict[str, Any] | None, tables: list[str]) -> dict[str, str]:
    """Return refused table → reason, from the result of the reader's command.

    If the reader applies none of the new rules, the key `the reader` has the reason.
    """
    from cdc.table import matches

    if outcome is None:
        return {}
    failed = outcome.get("error")
    if failed is not None:
        return {"the reader": f"{failed['code']} {failed['message']}; {failed['suggestion']}"}
    unread = {} if outcome["unread"] is None else {"the reader": f"the reader keeps the old rules: {outcome['unread']}"}
    return {topic: reason for topic, reason in outcome["refused"].items() if matches(topic, tables)} | unread


def _print_answer(outcome: dict[str, Any] | None, refused: dict[str, str], trouble: str | None, *, watch: str) -> None:
    if trouble is not None:
        line(LineMark.ADVICE, trouble, fix=watch)
    for subject, reason in refused.items():
        line(LineMark.BAD, f"{subject}: {reason}")
    for topic in (outcome or {}).get("added", ()):
        line(LineMark.GOOD, f"{topic}: published; the copy of its rows starts", fix=watch)
    for topic in (outcome or {}).get("removed", ()):
        line(LineMark.GOOD, f"{topic}: no longer captured; its rows in the log and in the sinks stay")


def _print(table: TableLine, file: str) -> None:
    from cdc.errors import complete_remedy
    from cdc.service.table_status import DROPPED
    from cdc.snapshot.backfill_status import progress_text

    number = "–" if table.relation is None else str(table.relation)
    sinks = "  ".join(f"{sink.sink} {sink.state}" for sink in table.sinks)
    echo(f"  {table.topic:<32}{number:>8}  {table.state:<14}{table.rows:>12,} copied  {sinks}".rstrip())
    if table.progress is not None and (words := progress_text(table.progress)):
        echo(f"      {words}")
    if table.state == DROPPED:
        fix = complete_remedy("take it off the list: 'cdc tables remove TABLE -c FILE'", topic=table.topic, file=file)
        line(LineMark.ADVICE, table.reason or DROPPED, fix=fix)
        return
    for where, reason in (("", table.reason), *((f"{sink.sink}: ", sink.reason) for sink in table.sinks)):
        if reason:
            line(LineMark.ADVICE, f"{where}{complete_remedy(reason, file=file)}")
