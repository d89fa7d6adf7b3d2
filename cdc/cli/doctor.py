"""`cdc doctor`: everything that keeps the source from being captured, each with the SQL that mends it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, ConfigOption, Envelope, ErrorReport, JsonOption, Mark, line
from cdc.errors import ExitCode, PreflightFailed

if TYPE_CHECKING:
    from cdc.postgres.preflight import Problem

SqlOption = Annotated[bool, typer.Option("--sql", help="Print nothing but the statements that mend it.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(config: ConfigOption = DEFAULT_CONFIG, sql: SqlOption = False, json: JsonOption = False) -> None:
    """Check the source: rights, settings, slot, publication, tables. Changes nothing."""
    from cdc.checks import problems as problems_of
    from cdc.config import load

    definition = load(config)
    problems = problems_of(definition)
    fatal = [problem for problem in problems if problem.fatal]
    if json:
        _print_envelope(problems, fatal)
    elif sql:
        _print_statements(problems)
    else:
        _print_lines(problems, definition.name)
    if fatal:
        raise typer.Exit(ExitCode.ENVIRONMENT.value)


def _print_envelope(problems: list[Problem], fatal: list[Problem]) -> None:
    found = f"{len(fatal)} to mend, {len(problems) - len(fatal)} to know"
    summary = found if problems else "the source can be captured"
    result = {"problems": [asdict(problem) for problem in problems]}
    error = None
    if fatal:
        first = fatal[0]
        fix = first.sql or PreflightFailed.remedy
        error = ErrorReport(code=first.code, message=f"{first.subject}: {first.message}", suggestion=fix)
    print(Envelope(command="doctor", ok=not fatal, summary=summary, result=result, error=error))


def _print_statements(problems: list[Problem]) -> None:
    for problem in problems:
        if problem.sql:
            print(f"-- {problem.code} {problem.subject}: {problem.message}".replace("\n", " "))
            print(problem.sql.rstrip().rstrip(";") + ";")


def _print_lines(problems: list[Problem], name: str) -> None:
    for problem in problems:
        mark = Mark.BAD if problem.fatal else Mark.ADVICE
        line(mark, f"{problem.code} {problem.subject}: {problem.message}", fix=problem.sql)
    if not problems:
        line(Mark.GOOD, f"the source of {name!r} can be captured", fix="cdc run")
