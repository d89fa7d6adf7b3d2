"""`cdc log verify`: check that the log is as it was written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.errors import ExitCode, LogDamaged
from cdc.terminal_output import Envelope, ErrorReport, LineMark, echo, line

if TYPE_CHECKING:
    from cdc.config import Definition
    from cdc.log.audit.verify import AuditReport

_MEBIBYTE: Final = 1 << 20

TablesOption = Annotated[
    list[str] | None, typer.Option("--tables", help="Check only files of tables that match this glob; may be repeated.")
]
SourceOption = Annotated[
    bool, typer.Option("--source", help="Also check at the source that the log was written from it.")
]


def verify(
    config: ConfigOption = DEFAULT_CONFIG,
    tables: TablesOption = None,
    source: SourceOption = False,
    json: JsonOption = False,
) -> None:
    """Read every file of the log and compare it with its commit; exit status 4 if something differs.

    It may run next to the reader and the apply process, and changes nothing. With --tables it does not check whether
    transactions are complete.
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
    """A function that prints progress on one line of a terminal, and nothing elsewhere."""
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
