"""`cdc log drop-file`: remove a damaged data file from the log when there is no copy of it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.destructive import YesOption, audit, confirm
from cdc.cli.options import ConfigOption, JsonOption
from cdc.terminal_output import emit

if TYPE_CHECKING:
    from cdc.log.audit.damaged_file import Damaged, Dropped

FileArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="Path of the file in the log, as 'cdc log verify' names it.")
]


def drop_file(
    file: FileArgument, config: ConfigOption = DEFAULT_CONFIG, yes: YesOption = False, json: JsonOption = False
) -> None:
    """Remove a damaged file from the log. Stop the reader and the apply process first; a running one is fenced off.

    Nothing is lost if the file's changes are compacted, or can be compacted again. Otherwise every table in it is
    marked needs_resync, 'cdc tables resync' copies it again, and consumers of the log get an error instead of wrong
    data. An undamaged file is refused. If the command is killed, run it again.
    """
    from dataclasses import asdict

    from cdc.config import load_definition
    from cdc.log.audit.damaged_file import Damaged

    definition = load_definition(config)
    damaged = Damaged.find(definition.log.root, file)
    confirm(_question(damaged), yes=yes)
    done = damaged.drop()
    result = asdict(done) | {"way": done.way.value, "first": str(done.first), "last": str(done.last)}
    audit(definition, "log.drop_file", done.file, result, json=json)
    emit("log drop-file", json=json, summary=_summary(done), result=result)


def _question(damaged: Damaged) -> str:
    from cdc.log.audit.damaged_file import RecoveryWay

    span = f"{damaged.file.first!s} to {damaged.file.last!s}"
    return {
        RecoveryWay.TRIMMED: f"trim the log up to the file's segment: {span} is compacted, and nothing is lost",
        RecoveryWay.START_OVER: "compact the log from its beginning again: all changes are there, and nothing is lost",
        RecoveryWay.GIVEN_UP: f"give up {damaged.file.rows:,} rows at {span}, and mark their tables needs_resync",
    }[damaged.way]


def _summary(done: Dropped) -> str:
    from cdc.log.audit.damaged_file import RecoveryWay

    if done.way is RecoveryWay.TRIMMED:
        return f"{done.file} left the log with its segment; its changes are compacted, start the reader"
    if done.way is RecoveryWay.START_OVER:
        return f"{done.file} left the log; start the apply process, which compacts the log again from its beginning"
    if not done.marked:
        return f"{done.file} left the log; it contained no row of a captured table, start the reader"
    resync = shlex.join(["cdc", "tables", "resync", *done.marked])
    return f"{done.file} left the log, marked needs_resync: {', '.join(done.marked)}; start the reader, then: {resync}"
