"""`cdc consumers`: list the consumers of the log, or forget a consumer so that retention no longer waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption, YesOption, audit, confirm
from cdc.command_output import LineMark, aligned, echo, emit, line

if TYPE_CHECKING:
    from cdc.service.log_status_records import ConsumerLine

NameArgument = Annotated[
    str,
    typer.Argument(
        help="Forget the consumer with this name or UUID; 'cdc consumers ls --json' prints both.", metavar="NAME"
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command group `consumers` to the app."""
    group = typer.Typer(
        no_args_is_help=True, help="List the consumers of the log, or forget a consumer.", rich_markup_mode=None
    )
    group.command()(ls)
    group.command()(forget)
    app.add_typer(group, name="consumers")


def ls(config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """List each consumer of the log with its position, its lag, the bytes kept for it, and its last heartbeat."""
    from dataclasses import asdict
    from datetime import UTC, datetime

    from cdc.cli.log_storage import open_log
    from cdc.service import number_format
    from cdc.service.log_status_reader import log_status

    definition, log = open_log(config)
    found = log_status(definition.log.root, log, datetime.now(UTC), str(config))
    problems = [problem for problem in found.problems if problem.subject.startswith("consumer ")]
    summary = number_format.format_quantity(len(found.consumers), "consumer")
    if json:
        result = {"consumers": [asdict(one) for one in found.consumers], "problems": [asdict(one) for one in problems]}
        emit("consumers ls", json=True, summary=summary, result=result)
        return
    if found.consumers:
        head = ("name", "state", "position", "behind", "retains", "last heartbeat", "")
        for text in aligned([head, *map(_cells, found.consumers)]):
            echo(text)
    emit("consumers ls", json=False, summary=summary)
    for problem in problems:
        line(LineMark.BAD, f"{problem.code} {problem.subject}: {problem.message}", fix=problem.remedy)


def forget(
    name: NameArgument, config: ConfigOption = DEFAULT_CONFIG, yes: YesOption = False, json: JsonOption = False
) -> None:
    """Forget a consumer that will not run again, so that the log no longer keeps changes for it.

    A consumer that still runs registers itself again. If the log has trimmed changes that the consumer had not read,
    rebuild its target.
    """
    from datetime import UTC, datetime

    from cdc.config import load_definition
    from cdc.log import consumers
    from cdc.service.log_status_reader import SILENT_AFTER, find_consumer, seconds_since_seen

    definition = load_definition(config)
    consumer = find_consumer(definition.log.root, name)
    ago = seconds_since_seen(consumer, datetime.now(UTC))
    if ago <= SILENT_AFTER:
        confirm(f"forget consumer {consumer.name!r}, whose last heartbeat was {ago:.0f} s ago", yes=yes)
    done = {"consumer": consumer.to_json(), "forgotten": consumers.forget(definition.log.root, consumer.uuid)}
    audit(definition, "consumers.forget", consumer.name, done, json=json)
    summary = f"forgot {consumer.name!r}, which was at {consumer.position}"
    emit("consumers forget", json=json, summary=summary, result=done)


def _cells(one: ConsumerLine) -> tuple[str, ...]:
    from cdc.cli.log_storage import lag_text
    from cdc.service import number_format

    retained = number_format.format_size(one.holds_bytes) if one.holds_bytes else "nothing"
    ago = f"{number_format.format_age(one.seen_seconds)} ago"
    filled = "" if one.pinned is None else "filled from the compacted log"
    return one.name, one.state, one.position, lag_text(one) or "at the end", retained, ago, filled
