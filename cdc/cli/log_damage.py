"""Commands about damaged files of the log: `cdc log verify` finds them, and `cdc log drop-file` removes one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption, YesOption, audit, confirm
from cdc.command_output import Envelope, ErrorReport, LineMark, echo, emit, line
from cdc.errors import ExitCode, LogDamaged

if TYPE_CHECKING:
    from cdc.config import Definition
    from cdc.log.audit.drop_file import DamagedFile, DroppedFile
    from cdc.log.audit.verify import AuditReport

_MEBIBYTE: Final = 1 << 20

TablesOption = Annotated[
    list[str] | None, typer.Option("--tables", help="Check only files of tables that match this glob; may be repeated.")
]
SourceOption = Annotated[
    bool, typer.Option("--source", help="Also check that the log was written from the source of the definition.")
]
FileArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="Remove the file at this path; 'cdc log verify' prints the path.")
]


def verify(
    config: ConfigOption = DEFAULT_CONFIG,
    tables: TablesOption = None,
    source: SourceOption = False,
    json: JsonOption = False,
) -> None:
    """Read every file of the log and compare it with the commit that added it; exit with status 4 if a file is damaged.

    The command changes nothing and may run while the reader and the apply process run. With --tables it does not check
    whether transactions are complete.
    """
    from cdc.config import load_definition
    from cdc.log.audit.verify import AuditScope
    from cdc.log.audit.verify import verify as look

    definition = load_definition(config)
    scope = AuditScope(
        globs=tuple(tables or ()),
        system_id=_system_id(definition) if source else None,
        grace=definition.log.retain.grace,
    )
    report = look(definition.log.root, scope, _progress())
    if json:
        echo(
            Envelope(command="log verify", ok=report.is_sound, summary=report.summary, **_envelope_fields(report)),
            flush=True,
        )
    else:
        _print(report)
    if not report.is_sound:
        raise typer.Exit(ExitCode.FINDING.value)


def _envelope_fields(report: AuditReport) -> dict[str, Any]:
    error = None if report.is_sound else ErrorReport.of(LogDamaged(report.summary))
    return {"result": report.to_json(), "error": error}


def _print(report: AuditReport) -> None:
    for finding in report.findings:
        line(LineMark.ADVICE if finding.is_harmless else LineMark.BAD, finding.line, fix=finding.remedy)
    line(LineMark.GOOD if report.is_sound else LineMark.BAD, report.summary)


def _progress() -> Callable[[int, int], None]:
    """Return a function that prints progress on one line of a terminal; it prints nothing if there is no terminal."""
    if not sys.stderr.isatty():
        return lambda _done, _total: None

    def show(done: int, total: int) -> None:
        end = "\n" if done >= total else ""
        text = f"\r{done // _MEBIBYTE:,} of {total // _MEBIBYTE:,} MiB read"
        echo(text, end=end, to=sys.stderr, flush=True)

    return show


def _system_id(definition: Definition) -> str:
    from cdc.postgres.replication import identify_system

    return identify_system(definition.source.dsn.reveal()).system_id


def drop_file(
    file: FileArgument, config: ConfigOption = DEFAULT_CONFIG, yes: YesOption = False, json: JsonOption = False
) -> None:
    """Remove a damaged file from the log. Stop the reader and the apply process first.

    Nothing is lost if the file's changes are compacted, or can be compacted again. Otherwise the command marks every
    table with rows in the file as needs_resync, and 'cdc tables resync' copies these tables again. Until then,
    consumers of the log get an error instead of wrong data. The command refuses an undamaged file. If the command is
    killed, run it again.
    """
    from dataclasses import asdict

    from cdc.config import load_definition
    from cdc.log.audit.drop_file import DamagedFile

    definition = load_definition(config)
    damaged = DamagedFile.find(definition.log.root, file)
    confirm(_question(damaged), yes=yes)
    done = damaged.drop()
    result = asdict(done) | {"way": done.way.value, "first": str(done.first), "last": str(done.last)}
    audit(definition, "log.drop_file", done.file, result, json=json)
    emit("log drop-file", json=json, summary=_summary(done), result=result)


def _question(damaged: DamagedFile) -> str:
    from cdc.log.audit.drop_file import RecoveryWay

    span = f"{damaged.file.first!s} to {damaged.file.last!s}"
    return {
        RecoveryWay.TRIMMED: f"trim the log up to the file's segment; {span} is compacted, so no change is lost",
        RecoveryWay.START_OVER: "compact the log from its beginning again; no change is lost, because none is trimmed",
        RecoveryWay.GIVEN_UP: f"lose {damaged.file.rows:,} rows at {span}, and mark their tables as needs_resync",
    }[damaged.way]


def _summary(done: DroppedFile) -> str:
    from cdc.log.audit.drop_file import RecoveryWay

    if done.way is RecoveryWay.TRIMMED:
        return f"removed {done.file} with its segment, whose changes are compacted; start the reader"
    if done.way is RecoveryWay.START_OVER:
        return f"removed {done.file}; start the apply process, which compacts the log again from its beginning"
    if not done.marked:
        return f"removed {done.file}, which contained no row of a captured table; start the reader"
    resync = shlex.join(["cdc", "tables", "resync", *done.marked])
    return (
        f"removed {done.file}, marked as needs_resync: {', '.join(done.marked)}; start the reader, then run: {resync}"
    )
