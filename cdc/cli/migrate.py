"""`cdc migrate`: upgrade the catalog's schema and the log's format."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import echo_source, emit
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from cdc.catalog.connection import Database

Revision = Annotated[str, typer.Option("--revision", help="Migrate the catalog to this revision.")]


def register(app: typer.Typer) -> None:
    """Add the command group `migrate` to the app."""
    group = typer.Typer(
        no_args_is_help=True, help="Upgrade the catalog's schema and the log's format.", rich_markup_mode=None
    )
    for command in (status, up, down, sql, log):
        group.command()(command)
    app.add_typer(group, name="migrate")


def status(config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Show the revision of the catalog, and the newest revision that this version of cdc knows."""
    from cdc.catalog import revision

    database = _database(config)
    found = revision.current(database)
    database.close()
    state = "up to date" if found == revision.HEAD else f"newest is {revision.HEAD}: run 'cdc migrate up'"
    if revision.is_newer(found):
        state = f"which this version of cdc does not know (its newest is {revision.HEAD}): use a newer version of cdc"
    result = {"current": found, "head": revision.HEAD}
    emit("migrate status", json=json, summary=f"catalog at {found or 'no revision'}, {state}", result=result)


def up(config: ConfigOption = DEFAULT_CONFIG, revision: Revision = "head", json: JsonOption = False) -> None:
    """Upgrade the catalog to a revision; the contents of the catalog stay."""
    from cdc.catalog import revision as revisions

    _move(config, "up", revisions.up, revision, json=json)


def down(
    config: ConfigOption = DEFAULT_CONFIG,
    revision: Revision = "base",
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Do not ask before dropping catalog tables that later revisions added."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Downgrade the catalog to a revision.

    The command drops the catalog tables that later revisions added. These tables contain no positions and no captured
    rows.
    """
    from cdc.catalog import revision as revisions

    if not yes:
        raise ConfigError(
            "the downgrade drops tables of the catalog and needs confirmation", remedy="repeat the command with --yes"
        )
    _move(config, "down", revisions.down, revision, json=json)


def sql(config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Print the SQL statements of all revisions; a database administrator can run them."""
    from cdc.catalog import revision
    from cdc.config import load_definition

    text = revision.sql(load_definition(config).catalog.url)
    if json:
        emit("migrate sql", json=True, summary="statements of all revisions", result={"sql": text})
    else:
        echo_source(text, end="")


def log(config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Upgrade a log that an older version of cdc wrote. Stop the reader and the apply process first.

    The positions and changes in the log stay the same. If the command is killed, run it again.
    """
    from cdc.config import load_definition
    from cdc.log.format_upgrade import migrate_log

    done = migrate_log(load_definition(config).log.root)
    what = "already has" if done.before == done.after else f"was upgraded from format {done.before} to"
    result = {"before": done.before, "after": done.after}
    emit("migrate log", json=json, summary=f"the log {what} format {done.after}", result=result)


def _move(config: ConfigOption, verb: str, move: Callable[[Database, str], None], to: str, *, json: bool) -> None:
    from cdc.catalog import revision

    database = _database(config)
    before = revision.current(database)
    move(database, to)
    after = revision.current(database)
    database.close()
    summary = f"migrated the catalog from {before or 'no revision'} to {after or 'no revision'}"
    emit(f"migrate {verb}", json=json, summary=summary, result={"before": before, "after": after})


def _database(config: ConfigOption) -> Database:
    from cdc.catalog.connection import Database
    from cdc.config import load_definition

    return Database(load_definition(config).catalog.url)
