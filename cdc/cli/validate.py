"""`cdc validate`: report every issue of definition files, without a connection to any server."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import JsonOption
from cdc.command_output import Envelope, ErrorReport, LineMark, counted, echo, line
from cdc.errors import ConfigError, ConfigIssue, ExitCode, InvalidDefinition

Paths = Annotated[
    list[Path] | None,
    typer.Argument(help="Check these definition files, and all definition files in these directories."),
]
Named = Annotated[
    list[Path] | None,
    typer.Option(
        "--config", "-c", help="Check this definition file or directory, in addition to those named as arguments."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command `validate` to the app."""
    app.command()(validate)


def validate(paths: Paths = None, config: Named = None, json: JsonOption = False) -> None:
    """Check definition files, without starting a process or connecting to a server."""
    files = [file for path in [*(paths or []), *(config or [])] or [DEFAULT_CONFIG.parent] for file in _files(path)]
    issues = [issue for file in files for issue in _issues(file)]
    fatal = tuple(issue for issue in issues if issue.fatal)
    summary = f"{counted(len(files), 'definition')}: {counted(len(fatal), 'issue') if fatal else 'valid'}"
    if json:
        result = {"files": [str(file) for file in files], "flaws": [asdict(issue) for issue in issues]}
        error = ErrorReport.of(InvalidDefinition.from_issues(fatal)) if fatal else None
        echo(Envelope(command="validate", ok=not fatal, summary=summary, result=result, error=error))
    else:
        _print(issues, summary, fix=InvalidDefinition.from_issues(fatal).fix if fatal else None)
    if fatal:
        raise typer.Exit(ExitCode.USAGE.value)


def _issues(file: Path) -> list[ConfigIssue]:
    from cdc.config import check_definition, issues_in_file, unprotected_service

    checked = check_definition(file)
    found = [] if checked.definition is None else issues_in_file(file, unprotected_service(checked.definition))
    return [*checked.issues, *found]


def _print(issues: list[ConfigIssue], summary: str, *, fix: str | None) -> None:
    from cdc.errors import complete_remedy

    for issue in issues:
        line(LineMark.BAD if issue.fatal else LineMark.ADVICE, f"{issue.code} {issue}")
    file = issues[0].path if fix and len({issue.path for issue in issues}) == 1 else None
    line(LineMark.BAD if fix else LineMark.GOOD, summary, fix=None if fix is None else complete_remedy(fix, file=file))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in {".yaml", ".yml"})
    if not found:
        raise ConfigError(
            f"no definition file (*.yaml) in {str(path)!r}", remedy="name a definition file or its directory"
        )
    return found
