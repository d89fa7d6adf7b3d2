"""`cdc dlq`: list, retry and discard dead letters, which are rows that a sink's target refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import LineMark, echo, emit, line
from cdc.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from pathlib import Path

    from cdc.catalog import DeadLetter
    from cdc.catalog.dead_letter_requests import DeadLetterAction
    from cdc.config import Definition
    from cdc.targets.dead_letter_rows import ParkedRow

IdArgument = Annotated[
    str,
    typer.Argument(
        help="Select the dead letter with this id; a unique prefix of the id is enough. `cdc dlq ls` prints the ids.",
        metavar="ID",
    ),
]
IdsArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Retry the dead letters with these ids; a unique prefix of an id is enough.", metavar="[ID]…"),
]
AllOption = Annotated[bool, typer.Option("--all", help="Retry every dead letter of the pipeline.")]
ReasonOption = Annotated[str, typer.Option(metavar="TEXT", help="Record this reason in the audit log.")]
WATCH = "cdc dlq ls -c {}"
_NO_KEY = "–"


def register(app: typer.Typer) -> None:
    """Add the command group `dlq` to the app."""
    group = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, help="List, retry or discard rows that a sink's target refused."
    )
    for command in (ls, show, retry, discard):
        group.command()(command)
    app.add_typer(group, name="dlq")


def ls(config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """List the dead letters that the apply process last reported, oldest change first."""
    from cdc.catalog import Catalog
    from cdc.catalog.dead_letter_requests import to_json
    from cdc.config import load_definition
    from cdc.service.defined_pipeline import DefinedPipeline

    definition = load_definition(config)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        letters = DefinedPipeline.of(definition).dead_letters(catalog)
    summary = "1 key is parked" if len(letters) == 1 else f"{len(letters):,} keys are parked"
    if json:
        emit("dlq ls", json=True, summary=summary, result={"letters": [to_json(letter) for letter in letters]})
        return
    for letter in letters:
        echo(f"  {letter.id}  {letter.sink:<12}{letter.topic:<28}{_key(letter)}  {letter.code} {letter.message}")
    emit("dlq ls", json=False, summary=summary)


def show(letter: IdArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Show one dead letter: the error, the time at which the row was parked, and the values of the parked row."""
    from cdc.catalog import Catalog
    from cdc.catalog.dead_letter_requests import find_dead_letters, to_json
    from cdc.config import load_definition

    definition = load_definition(config)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        (found,) = find_dead_letters(catalog, definition.name, [letter])
    row, names = _find_parked_row(definition, found)
    parked: dict[str, Any] = {"attempts": None, "complete": None, "row": None, "changes": None}
    if row is not None:
        # a missing column was not sent, or the target does not have it
        values = {name: _shown(row.image[column]) for column, name in names.items() if column in row.image}
        changes = sum(change.began is None and change.op != "t" for change in row.changes)
        parked = {"attempts": row.attempts, "complete": row.complete, "row": values, "changes": changes}
    summary = f"{found.sink} {found.topic} {_key(found)}: {found.code} {found.message}"
    if json:
        emit("dlq show", json=True, summary=summary, result=to_json(found) | parked)
        return
    for name, value in (to_json(found) | {name: parked[name] for name in ("attempts", "changes")}).items():
        echo(f"{name + ':':12}{value}")
    for name, value in (parked["row"] or {}).items():
        echo(f"  {name:<28}{'NULL' if value is None else value}")
    if row is None:
        line(LineMark.ADVICE, "the row is no longer parked: the apply process removes the dead letter within a second")
    elif not row.complete:
        line(
            LineMark.ADVICE,
            "the parked row is incomplete: the source did not send every column, so the reader reads the row again",
            fix=f"cdc backfill ls -c {config}",
        )


def retry(
    letters: IdsArgument = None,
    everything: AllOption = False,
    config: ConfigOption = DEFAULT_CONFIG,
    json: JsonOption = False,
) -> None:
    """Merge parked rows again. Correct the cause of their errors before you run this command."""
    from cdc.catalog.dead_letter_requests import DeadLetterAction

    if bool(letters) == everything:
        raise ConfigError(
            "dlq retry needs either ids of dead letters or --all", remedy="run 'cdc dlq ls' to see the ids"
        )
    _send_request(letters, DeadLetterAction.RETRY, None, config=config, json=json)


def discard(
    letter: IdArgument, reason: ReasonOption, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False
) -> None:
    """Discard a dead letter: the target keeps its old row for the key, and `cdc verify` then reports a mismatch."""
    from cdc.catalog.dead_letter_requests import DeadLetterAction

    if not reason.strip():
        raise ConfigError("--reason is missing or empty", remedy="give a reason: --reason TEXT")
    _send_request([letter], DeadLetterAction.DISCARD, reason, config=config, json=json)


def _send_request(
    names: list[str] | None, verb: DeadLetterAction, reason: str | None, *, config: Path, json: bool
) -> None:
    """Request that the running apply process retries or discards dead letters; print the outcome per dead letter.

    names: ids of the dead letters, or unique prefixes of ids; None for all dead letters of the pipeline.
    """
    from getpass import getuser

    from cdc.catalog import Catalog
    from cdc.catalog.dead_letter_requests import DeadLetterRequest, await_outcomes, find_dead_letters, request_action
    from cdc.config import load_definition
    from cdc.service.defined_pipeline import DefinedPipeline

    definition = load_definition(config)
    with Catalog.open(definition.catalog.url) as catalog:
        known = DefinedPipeline.of(definition).dead_letters(catalog)
        letters = known if names is None else find_dead_letters(catalog, definition.name, names)
        posted = request_action(catalog, definition.name, letters, DeadLetterRequest(verb, getuser(), reason))
        outcomes = await_outcomes(catalog, posted)
    waiting = [letter.id for letter in letters if letter.id not in outcomes]
    command = f"dlq {verb.value}"
    refused = [letter for letter in letters if outcomes.get(letter.id) == "parked"]
    summary = f"requested to {verb.value} {len(letters)} of {len(known)} dead letters"
    summary += f", the target refused {len(refused)} again" if refused else ""
    if json:
        result = {"commands": posted, "letters": outcomes, "waiting": waiting}
        emit(command, json=True, summary=summary, result=result, ok=not refused)
    else:
        for letter in letters:
            echo(f"  {letter.id}  {outcomes.get(letter.id, 'pending')}")
        line(
            LineMark.BAD if refused else LineMark.GOOD,
            summary,
            fix=WATCH.format(config) if refused or waiting else None,
        )
    if refused:
        raise typer.Exit(ExitCode.FINDING.value)


def _find_parked_row(definition: Definition, letter: DeadLetter) -> tuple[ParkedRow | None, dict[int, str]]:
    """Return the parked row of a dead letter, and its column names by column id.

    Returns (None, {}) if the row is no longer parked.
    """
    from cdc.table import TableSchema
    from cdc.targets.sink_kinds import reading_of

    sink = next((sink for sink in definition.sinks if sink.name == letter.sink), None)
    if sink is None:
        return None, {}
    reading = reading_of(sink)
    state = reading.parked(sink)
    row = next((row for row in state.rows if (row.topic, row.key) == (letter.topic, letter.key)), None)
    if row is None or state.record is None:
        return None, {}
    # a row that was parked under other rules may contain columns that the present rules hide
    reading.check_rules(sink, row.relation)
    schema = state.record.tables[row.relation].schema
    names = {} if schema is None else {c.id: c.name for c in TableSchema.from_json(schema).columns}
    return row, names


def _shown(text: str | None) -> str | None:
    from cdc.targets.dead_letter_rows import MASKED

    return None if text is None else text.removeprefix(MASKED)


def _key(letter: DeadLetter) -> str:
    return f"({', '.join(letter.key)})" if letter.key else _NO_KEY
