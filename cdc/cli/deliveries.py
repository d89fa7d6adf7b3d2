"""`cdc deliver`, which sends deliveries, and `cdc deliveries`, which shows and controls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption, YesOption, change_pause, confirm
from cdc.command_output import LineMark, aligned, echo, emit, line
from cdc.errors import UnknownName

if TYPE_CHECKING:
    from pathlib import Path

    from cdc.config.destinations import Delivery

NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Send only these deliveries [default: all, except those to stdout].", metavar="[NAME]…"),
]
NameArgument = Annotated[str, typer.Argument(help="Name of a delivery of the definition.", metavar="NAME")]
ToOption = Annotated[
    str,
    typer.Option(
        "--to", help="Send again everything after this position or time; 'earliest' and 'latest' are possible, too."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command `deliver` and the command group `deliveries` to the app."""
    app.command()(deliver)
    group = typer.Typer(
        no_args_is_help=True, help="Show, pause, resume or rewind deliveries of events.", rich_markup_mode=None
    )
    for command in (ls, show, pause, resume, rewind):
        group.command()(command)
    app.add_typer(group, name="deliveries")


def deliver(names: NamesArgument = None, config: ConfigOption = DEFAULT_CONFIG) -> None:
    """Send the changes of the log to brokers, files and sockets, until ^C or SIGTERM; 'cdc run' starts this process.

    The process waits up to 20 s for receivers that have not acknowledged; the same signal again ends it at once. A
    delivery of type stdout prints events, one JSON object per line: 'cdc deliver NAME | jq .value'.
    """
    from cdc.allocators import use_system_allocators
    from cdc.import_guard import refuse_pandas

    refuse_pandas()
    from cdc.config import load_definition
    from cdc.delivery.delivery_process import main
    from cdc.delivery.delivery_summary import check_name
    from cdc.logging_setup import configure_by_environment

    configure_by_environment(str(config))
    definition = load_definition(config)
    chosen: list[Delivery] = [delivery for delivery in definition.deliveries if not delivery.is_run_by_hand]
    for name in names or ():
        check_name(definition, name)
    if names:
        chosen = [delivery for delivery in definition.deliveries if delivery.name in names]
    if not chosen:
        raise UnknownName(
            f"pipeline {definition.name!r} has no delivery to send",
            remedy="add one to 'deliveries' in the definition, or write the name of a delivery to stdout",
        )
    use_system_allocators(client_threads=True)
    raise typer.Exit(main(definition, chosen))


def ls(config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """List each delivery with its destination, promise, position, lag and state."""
    from dataclasses import asdict

    from cdc.catalog import Catalog
    from cdc.config import load_definition
    from cdc.delivery.delivery_summary import summaries

    definition = load_definition(config)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        found = [asdict(one) for one in summaries(definition, catalog)]
    summary = "1 delivery" if len(found) == 1 else f"{len(found)} deliveries"
    if json:
        emit("deliveries ls", json=True, summary=summary, result={"deliveries": found})
        return
    if found:
        names = ("name", "type", "promise", "state", "position", "lag_seconds", "reason")
        rows = [tuple("" if one[name] is None else str(one[name]) for name in names) for one in found]
        for text in aligned([("name", "type", "promise", "state", "position", "lag s", ""), *rows]):
            echo(text)
    emit("deliveries ls", json=False, summary=summary)


def show(name: NameArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Show one delivery: what it sends, where it is, and its dead letters."""
    from dataclasses import asdict

    from cdc.catalog import Catalog
    from cdc.catalog.dead_letter_requests import to_json
    from cdc.config import load_definition
    from cdc.delivery.delivery_summary import check_name, summaries

    definition = load_definition(config)
    check_name(definition, name)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        result = next(asdict(one) for one in summaries(definition, catalog) if one.name == name)
        letters = [to_json(one) for one in catalog.dead_letters.ls(definition.name) if one.sink == name]
    summary = f"delivery {name!r}: {result['state']}, {len(letters)} dead letters"
    if json:
        emit("deliveries show", json=True, summary=summary, result={**result, "dead_letters": letters})
        return
    for key, value in result.items():
        echo(f"{key + ':':14}{'' if value is None else value}")
    for letter in letters:
        line(LineMark.BAD, f"{letter['code']} {letter['table']} {letter['key']}: {letter['message']}", fix="cdc dlq ls")
    emit("deliveries show", json=False, summary=summary)


def pause(name: NameArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Pause a delivery until 'cdc deliveries resume'; the log keeps its changes, at most for log.retain.max."""
    _change("pause", name, config, json=json)


def resume(name: NameArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Let a paused delivery continue where it was."""
    _change("resume", name, config, json=json)


def rewind(
    name: NameArgument,
    to: ToOption = "earliest",
    config: ConfigOption = DEFAULT_CONFIG,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Send a range of the log again, from a position up to now. Every event has the same id as before.

    The running process carries the request out. 'latest' skips everything that was not sent yet.
    """
    from getpass import getuser

    from cdc.catalog import Catalog, delivery_requests
    from cdc.cli.log_changes import parse_since
    from cdc.cli.log_storage import open_log
    from cdc.delivery.delivery_summary import check_name
    from cdc.position import Position

    definition, log = open_log(config)
    check_name(definition, name)
    ends = {"earliest": Position(0), "latest": log.durable or Position(0)}
    found = None if to in ends else parse_since(log, to)
    position = ends[to] if found is None else found[0]
    if found is not None and found[1] is None:
        position = Position.parse(to)  # 'after', unlike --since of other commands, which includes the position
    confirm(f"send delivery {name!r} again from position {position}", yes=yes)
    with Catalog.open(definition.catalog.url) as catalog:
        number = delivery_requests.request_rewind(catalog, definition.name, name, str(position), getuser())
        is_done = delivery_requests.await_rewind(catalog, number)
    summary = f"delivery {name!r} continues after {position}"
    if not is_done:
        summary = f"delivery {name!r} will continue after {position} as soon as 'cdc run' or 'cdc deliver' runs"
    emit("deliveries rewind", json=json, summary=summary, result={"position": str(position), "done": is_done})


def _change(verb: str, name: str, config: Path, *, json: bool) -> None:
    from cdc.catalog.delivery_requests import DELIVERY_PAUSES
    from cdc.config import load_definition
    from cdc.delivery.delivery_summary import check_name

    definition = load_definition(config)
    check_name(definition, name)
    change_pause(definition, DELIVERY_PAUSES, f"deliveries {verb}", name, json=json)
