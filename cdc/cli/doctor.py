"""`cdc doctor`: report the problems of source, sinks and deliveries, each with its remedy."""

from __future__ import annotations

import json as encoder
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import Envelope, ErrorReport, LineMark, echo, echo_source, line
from cdc.errors import ChildFailed, ConfigIssue, ExitCode, InvalidDefinition, SinkUnavailable

if TYPE_CHECKING:
    from cdc.config import Definition
    from cdc.postgres.preflight import PreflightProblem

SqlOption = Annotated[bool, typer.Option("--sql", help="Print only the SQL statements that fix the problems.")]
RulesOption = Annotated[
    bool,
    typer.Option(
        "--rules", help="Also check the expressions and columns of the sink rules with Spark; this takes some seconds."
    ),
]
SOURCE_ANSWERS = 5.0
"""Maximum seconds to wait for the source's answer to the query about the slot."""
NO_PROBLEMS = "the source can be captured, and the targets can be filled"


def register(app: typer.Typer) -> None:
    """Add the command `doctor` to the app."""
    app.command()(doctor)


def doctor(
    config: ConfigOption = DEFAULT_CONFIG, sql: SqlOption = False, rules: RulesOption = False, json: JsonOption = False
) -> None:
    """Check source, targets and the destinations of deliveries without changing anything.

    The command checks rights, settings, slot, publication, tables and columns, and connects to each destination. It
    exits with status 3 if the source cannot be captured or a delivery cannot send, 2 if only the definition of a sink
    is wrong, and 4 if only the slot may soon be lost.
    """
    from cdc.capture.startup_checks import defined_tables, mask_problems, rule_problems
    from cdc.capture.startup_checks import find_problems as problems_of
    from cdc.config import issues_in_file, load_definition, unprotected_service
    from cdc.delivery.delivery_checks import delivery_problems
    from cdc.targets.unwritable_tables import sink_conflicts

    definition = load_definition(config)
    problems, tables = problems_of(definition), [] if sql else defined_tables(definition)
    found = [*sink_conflicts(definition, tables), *unprotected_service(definition)]
    stores = [_store_problem(one.error) for one in found if isinstance(one.error, SinkUnavailable)]
    # a store that does not answer is reported once
    ruled = [one for one in rule_problems(definition, str(config)) if not stores or one.code != SinkUnavailable.code]
    problems += [*ruled, *mask_problems(definition, tables), *stores]
    problems += [] if sql else delivery_problems(definition, tables)
    if tables:
        from cdc.capture.unmatched_names import unmatched_name_problems

        problems += unmatched_name_problems(definition, tables)
    if definition.views and tables:
        from cdc.capture.view_key_checks import view_key_problems  # few definitions have views

        problems += view_key_problems(definition, tables)
    issues = list(issues_in_file(config, [one for one in found if not isinstance(one.error, SinkUnavailable)]))
    if rules and tables:
        unresolved, failed = _check_rules_with_spark(config)
        issues = sorted([*issues, *unresolved], key=lambda issue: (issue.line, issue.column))
        problems += failed
    risks = _slot_risks(definition)
    problems += risks
    fatal = [problem for problem in problems if problem.fatal]
    if json:
        _print_envelope(problems, issues)
    elif sql:
        _print_statements(problems)
    else:
        _print_lines(problems, issues, _next_command(definition, config, rules=rules))
    if fatal or issues:
        raise typer.Exit((ExitCode.ENVIRONMENT if fatal else ExitCode.USAGE).value)
    if risks:
        raise typer.Exit(ExitCode.FINDING.value)


def _slot_risks(definition: Definition) -> list[PreflightProblem]:
    """Return one problem if the pipeline's slot may soon be lost, otherwise an empty list.

    The list is also empty if the slot is already lost, because another check reports a lost slot.
    """
    from cdc.errors import SlotInvalidated
    from cdc.postgres.preflight import PreflightProblem
    from cdc.service.slot_risk import LOST
    from cdc.service.source_sampler import SourceSampler

    observed = SourceSampler(definition).wait_for_rate(SOURCE_ANSWERS)
    if not observed.is_at_risk or observed.forecast is None or observed.wal_status in LOST:
        return []
    subject = f"slot {observed.slot}"
    return [PreflightProblem(SlotInvalidated.code, subject, observed.forecast, sql=observed.sql, fatal=False)]


def _store_problem(error: Any) -> PreflightProblem:
    from cdc.postgres.preflight import PreflightProblem

    return PreflightProblem(code=error.code, subject="sinks", message=f"{error.message}; {error.fix}")


def _check_rules_with_spark(config: Path) -> tuple[list[ConfigIssue], list[PreflightProblem]]:
    """Check the rules of the sinks with Spark, and return (issues, problems).

    The issues are those that Spark found. If Spark could not check the rules, return no issue and one problem that
    names the reason.
    """
    import subprocess
    import sys

    from cdc.postgres.preflight import PreflightProblem

    # a child process: this package does not import Spark
    command = [sys.executable, "-m", "pipelines", "check", "-c", str(config), "--json"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    try:
        answer = encoder.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        return [], [PreflightProblem(ChildFailed.code, "rules", f"Spark did not check the rules: {last}")]
    if answer["ok"] or (answer["result"] or {}).get("flaws"):
        return [ConfigIssue(**issue) for issue in answer["result"]["flaws"]], []
    error = answer["error"]
    return [], [
        PreflightProblem(
            error["code"], "rules", f"Spark did not check the rules: {error['message']}; {error['suggestion']}"
        )
    ]


def _next_command(definition: Definition, config: Path, *, rules: bool) -> str:
    """Return the text that names the next command after a check without problems."""
    made = (rule for sink in definition.sinks for rule in getattr(sink, "rules", ()))
    unasked = not rules and any(rule.transform or rule.partition_by or rule.cluster_by for rule in made)
    run = f"cdc run -c {config}"
    return f"cdc doctor --rules -c {config}  checks the rules with Spark; then  {run}" if unasked else run


def _print_envelope(problems: list[PreflightProblem], issues: list[ConfigIssue]) -> None:
    fatal = [problem for problem in problems if problem.fatal]
    to_fix = len(fatal) + len(issues)
    summary = f"{to_fix} problems to fix, {len(problems) - len(fatal)} warnings" if problems or issues else NO_PROBLEMS
    result = {"problems": [asdict(problem) for problem in problems], "flaws": [asdict(issue) for issue in issues]}
    error = None
    if fatal:
        first = fatal[0]
        fix = first.sql or "fix the listed problems, and run 'cdc doctor' again"
        error = ErrorReport(code=first.code, message=f"{first.subject}: {first.message}", suggestion=fix)
    elif issues:
        error = ErrorReport.of(InvalidDefinition.from_issues(tuple(issues)))
    echo(Envelope(command="doctor", ok=not to_fix, summary=summary, result=result, error=error))


def _print_statements(problems: list[PreflightProblem]) -> None:
    for problem in problems:
        if problem.sql:
            echo_source(f"-- {problem.code} {problem.subject}: {problem.message}".replace("\n", " "))
            echo_source(problem.sql.rstrip().rstrip(";") + ";")


def _print_lines(problems: list[PreflightProblem], issues: list[ConfigIssue], following: str) -> None:
    for problem in problems:
        mark = LineMark.BAD if problem.fatal else LineMark.ADVICE
        line(mark, f"{problem.code} {problem.subject}: {problem.message}", fix=problem.sql)
    for issue in issues:
        line(LineMark.BAD, f"{issue.code} {issue}", fix=issue.fix)
    if not problems and not issues:
        line(LineMark.GOOD, NO_PROBLEMS, fix=following)
