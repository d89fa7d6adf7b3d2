"""`cdc backfill` and `cdc tables resync`: read rows of the source again, beside the stream."""

from __future__ import annotations

from getpass import getuser
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from cdc.cli.output import DEFAULT_CONFIG, ConfigOption, JsonOption, Mark, emit, line
from cdc.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from cdc.catalog.commands import Command
    from cdc.config import Definition
    from cdc.snapshot.work import Request

TablesArgument = Annotated[list[str], typer.Argument(help="Globs of schema.table.", metavar="TABLE…")]
JobArgument = Annotated[int, typer.Argument(help="Its number, as `cdc backfill ls` shows it.", metavar="ID")]
WhereOption = Annotated[
    str | None, typer.Option(help="Rows for which this holds, in the source's SQL; it is run read-only.")
]
KeysOption = Annotated[
    str | None,
    typer.Option(metavar="FROM..TO", help="Keys from and to, both included; either may be left out; composite: a,b."),
]
SinkOption = Annotated[str | None, typer.Option(help="For this sink alone; the others write nothing for it.")]
RateOption = Annotated[int | None, typer.Option(min=1, help="Rows per second at most.")]


class DefaultsToStart(TyperGroup):
    """`cdc backfill TABLE` is `cdc backfill start TABLE`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Take what is no name of a command for the first table."""
        if args and args[0] not in self.commands:
            args = ["start", *args]
        return super().resolve_command(ctx, args)


def register(app: typer.Typer) -> None:
    """Add the groups."""
    group = typer.Typer(
        cls=DefaultsToStart,
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Read rows of the source again while the stream runs: `cdc backfill TABLE`, and what became of it.",
    )
    for command in (start, ls, show, pause, resume, cancel):
        group.command()(command)
    app.add_typer(group, name="backfill")
    tables = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Tables of the pipeline.")
    tables.command()(resync)
    app.add_typer(tables, name="tables")


def start(  # noqa: PLR0913, PLR0917 - one parameter per option
    tables: TablesArgument,
    where: WhereOption = None,
    keys: KeysOption = None,
    sink: SinkOption = None,
    rate: RateOption = None,
    config: ConfigOption = DEFAULT_CONFIG,
    json: JsonOption = False,
) -> None:
    """Read rows again and place them into the stream; the running reader does it.

    Rows that are gone at the source stay in the sinks: `cdc tables resync` takes them away.
    """
    from cdc.config import load
    from cdc.snapshot.work import Request

    first, last = _range(keys)
    request = Request(tuple(tables), where=where, first=first, last=last, sink=sink, rate=rate)
    _ask(load(config), request, command="backfill", config=str(config), json=json)


def resync(
    tables: TablesArgument,
    rate: RateOption = None,
    config: ConfigOption = DEFAULT_CONFIG,
    json: JsonOption = False,
) -> None:
    """Copy whole tables again beside the stream.

    What vanished at the source while nobody watched vanishes from every sink; a needs_resync mark is taken away.
    """
    from cdc.config import load
    from cdc.snapshot.work import Request

    request = Request(tuple(tables), rate=rate, resync=True)
    _ask(load(config), request, command="tables resync", config=str(config), json=json)


def ls(config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """List the backfills, newest first."""
    from cdc.catalog import Catalog
    from cdc.config import load
    from cdc.snapshot.jobs import BACKFILL

    definition = load(config)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        found = catalog.commands.ls(definition.name, BACKFILL)
    summary = f"{len(found)} backfills"
    if not json:
        for command in found:
            print(_line(command))
    emit("backfill ls", json=json, summary=summary, result={"backfills": [_told(command) for command in found]})


def show(job: JobArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Say how far one has come, table by table."""
    from cdc.catalog import Catalog
    from cdc.config import load

    definition = load(config)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        command = _found(catalog, definition, job)
    told = _told(command)
    if json:
        emit("backfill show", json=True, summary=_line(command), result=told)
        return
    print(_line(command))
    for topic, done in told["tables"].items():
        print(f"  {topic:<40}{done['state']:<14}{_progress(done)}")
    if (error := told.get("error")) is not None:
        line(Mark.BAD, f"{error['code']} {error['message']}", fix=error["suggestion"])


def pause(job: JobArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Let it rest after the chunk that is on its way."""
    _say(job, "pause", config=config, json=json)


def resume(job: JobArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Let it go on."""
    _say(job, "resume", config=config, json=json)


def cancel(job: JobArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """End it after the chunk that is on its way; what was placed stays."""
    _say(job, "cancel", config=config, json=json)


def _ask(definition: Definition, request: Request, *, command: str, config: str, json: bool) -> None:
    from cdc.catalog import Catalog
    from cdc.log.read import LogReader
    from cdc.postgres.chunk import check_predicate
    from cdc.postgres.connection import connect
    from cdc.snapshot.jobs import BACKFILL
    from cdc.snapshot.work import check_request

    sinks = {sink.name: sink for sink in definition.sinks}
    tables = check_request(request, LogReader(definition.log.path).schemas(), sinks)
    if request.where is not None:
        with connect(definition.source.dsn.reveal(), application_name="cdc backfill") as conn:
            for schema in tables:
                check_predicate(conn, schema, request.where)
    topics = sorted(schema.topic for schema in tables)
    with Catalog.open(definition.catalog.url) as catalog:
        for other in catalog.commands.pending(definition.name, BACKFILL):
            shared = sorted(set(topics) & set(_topics(other, topics)))
            if shared:
                raise ConfigError(
                    f"backfill {other.id} is already on its way over {', '.join(shared)}",
                    remedy=f"wait for it, or cdc backfill cancel {other.id} -c {config}",
                )
        job = catalog.commands.post(definition.name, BACKFILL, request.to_json())
        catalog.audit.write(getuser(), command, definition.name, {"id": job, "tables": topics})
    summary = f"backfill {job}: {len(topics)} tables, done by the running reader"
    if not json:
        line(Mark.GOOD, summary, fix=f"cdc backfill show {job} -c {config}")
    else:
        emit(command, json=True, summary=summary, result={"id": job, "tables": topics})


def _topics(command: Command, topics: list[str]) -> list[str]:
    from fnmatch import fnmatchcase

    return [t for t in topics if any(fnmatchcase(t, glob) for glob in command.payload["tables"])]


def _say(job: int, what: str, *, config: Any, json: bool) -> None:
    from cdc.catalog import Catalog
    from cdc.config import load

    definition = load(config)
    with Catalog.open(definition.catalog.url) as catalog:
        command = _found(catalog, definition, job)
        if command.state != "pending":
            raise ConfigError(f"backfill {job} is {_told(command)['state']} already")
        catalog.commands.post(definition.name, f"backfill.{what}", {"id": job})
        catalog.audit.write(getuser(), f"backfill {what}", definition.name, {"id": job})
    emit(f"backfill {what}", json=json, summary=f"asked backfill {job} to {what}", result={"id": job})


def _found(catalog: Any, definition: Definition, job: int) -> Command:
    from cdc.snapshot.jobs import BACKFILL

    known: list[Command] = catalog.commands.ls(definition.name, BACKFILL)
    for command in known:
        if command.id == job:
            return command
    listed = ", ".join(str(command.id) for command in known[:10]) or "none"
    raise UnknownName(f"no backfill has the number {job}", remedy=f"there are: {listed}")


def _told(command: Command) -> dict[str, Any]:
    work = {"state": "queued", "tables": {}} | (command.result or {})
    return {"id": command.id, "request": command.payload, **work}


def _line(command: Command) -> str:
    told = _told(command)
    rows = sum(done["rows"] for done in told["tables"].values())
    what = ", ".join(command.payload["tables"]) + (f" into {s}" if (s := command.payload.get("sink")) else "")
    kind = "resync" if command.payload.get("resync") else "backfill"
    return f"{command.id:>4}  {kind:<9}{told['state']:<14}{rows:>12,} rows  {what}"


def _progress(done: dict[str, Any]) -> str:
    """Rows, the share of the estimate, rate and what is left."""
    rows, estimate, seconds = done["rows"], max(done["estimate"], done["rows"]), done["seconds"]
    text = f"{rows:>12,} rows"
    if seconds <= 0 or not rows:
        return text
    rate = rows / seconds
    text += f"  {rate:,.0f}/s"
    if done["state"] != "done" and estimate:
        text += f"  {rows / estimate:.0%} of about {estimate:,}  {(estimate - rows) / rate:,.0f} s left"
    return text


def _range(keys: str | None) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    if keys is None:
        return None, None
    if ".." not in keys:
        raise ConfigError(f"malformed range {keys!r}: expected FROM..TO", remedy="for one key write KEY..KEY")
    first, _, last = keys.partition("..")
    return tuple(first.split(",")) if first else None, tuple(last.split(",")) if last else None
