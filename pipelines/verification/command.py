"""The command line verb `verify`: checks the options, runs the verification and prints its results.

The options are checked before source, log or sinks are opened.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from pydantic_core import PydanticCustomError

from cdc.command_output import Envelope, ErrorReport, LineMark, line
from cdc.config import load_definition
from cdc.config.units import seconds
from cdc.errors import ConfigError, ExitCode, VerifyMismatch, complete_remedy
from cdc.verify_and_replay_options import Against, VerifyMode
from pipelines.verification import scheduled
from pipelines.verification.compare_table import TableVerdict
from pipelines.verification.continuous import ContinuousVerification, RangeResult, VerificationSchedule
from pipelines.verification.repair import RepairResult, repair
from pipelines.verification.verify import VerifyOptions, VerifyReport, verify

MIN_INTERVAL: Final = 1.0
"""Minimum of `--every` in seconds, because each pass creates a slot on the source."""


def run(arguments: argparse.Namespace) -> int:
    """Run one verification, or repeat verifications until the process is stopped; return the exit status.

    Raises ConfigError for invalid or conflicting options.
    """
    if arguments.scheduled:
        return scheduled.run(load_definition(arguments.config), print_range_json)
    options = VerifyOptions(
        tables=tuple(arguments.tables),
        sinks=tuple(arguments.sink),
        timeout=arguments.timeout,
        mode=VerifyMode(arguments.mode),
        against=Against(arguments.against),
    )
    schedule = _schedule(arguments)
    if options.against is Against.LOG and (arguments.repair or schedule is not None):
        conflict = "--repair" if arguments.repair else "--every"
        raise ConfigError(
            f"{conflict} cannot be combined with --against log: {conflict} reads the source",
            remedy=f"omit --against log, so that {conflict} reads the source",
        )
    if schedule is not None:
        return _verify_continuously(arguments, options, schedule)
    if arguments.repair:
        outcome = repair(load_definition(arguments.config), options)
        return _print_report(arguments, outcome.report, outcome.repairs, outcome.to_json(), outcome.summary)
    report = verify(load_definition(arguments.config), options)
    return _print_report(arguments, report, (), report.to_json(), report.summary)


def _schedule(arguments: argparse.Namespace) -> VerificationSchedule | None:
    if arguments.rate is not None and arguments.rate < 1:
        raise ConfigError(f"--rate {arguments.rate}: expected at least 1 row per second")
    if arguments.every is None:
        if arguments.rate is not None:
            raise ConfigError("--rate requires --every", remedy="add an interval, for example --every 1h")
        return None
    try:
        every = seconds(arguments.every)
    except PydanticCustomError as error:
        raise ConfigError(
            f"--every {arguments.every!r}: {error.message()}", remedy="write a duration such as 30m or 1h"
        ) from None
    if every < MIN_INTERVAL:
        raise ConfigError(f"--every {arguments.every!r}: expected at least {MIN_INTERVAL:.0f}s")
    if arguments.mode == VerifyMode.COUNT:
        raise ConfigError(
            "--every cannot be combined with --mode count: equal counts do not verify rows",
            remedy="write --mode rows or --mode checksum",
        )
    return VerificationSchedule(every=every, rate=arguments.rate, repair=arguments.repair)


def _verify_continuously(arguments: argparse.Namespace, options: VerifyOptions, schedule: VerificationSchedule) -> int:
    definition = load_definition(arguments.config)
    report = print_range_json if arguments.json else _print_range
    verification = ContinuousVerification(definition, options, schedule, report)
    verification.run()
    return int((ExitCode.FINDING if verification.wrong else ExitCode.OK).value)


def print_range_json(range_result: RangeResult) -> None:
    """Print one envelope for the result of a range, or for the error that prevented the comparison."""
    if range_result.error is not None:
        error = ErrorReport.of(range_result.error)
        _print_envelope(Envelope(command="verify", ok=False, summary=range_result.error.message, error=error))
    elif range_result.verdict is not None:
        summary = _range_summary(range_result, range_result.verdict)
        mismatch = None if range_result.verdict.equal else ErrorReport.of(VerifyMismatch(summary))
        result = range_result.to_json()
        _print_envelope(Envelope(command="verify", ok=mismatch is None, summary=summary, result=result, error=mismatch))


def _print_range(range_result: RangeResult) -> None:
    if range_result.error is not None:
        line(LineMark.ADVICE, range_result.error.message, fix=range_result.error.fix)
    elif range_result.verdict is not None:
        mark = LineMark.GOOD if range_result.verdict.equal else LineMark.BAD
        line(mark, _range_summary(range_result, range_result.verdict))
        _print_keys(range_result.verdict)


def _range_summary(range_result: RangeResult, verdict: TableVerdict) -> str:
    text = f"{verdict.sink} {verdict.topic}: {verdict_text(verdict)}"
    found = range_result.found
    if found is None or (found.first is None and found.ended is None):
        return text
    return f"{text} from {found.first or 'the beginning'} to {found.ended or 'the end'}"


def _remedy(report: VerifyReport, file: str) -> str:
    """Return the remedy for a report with mismatches. It names sink and table if exactly one table differs."""
    wrong = [(verdict.sink, verdict.topic) for verdict in report.tables if not verdict.equal]
    sink, topic = wrong[0] if len(wrong) == 1 else (None, None)
    return complete_remedy(VerifyMismatch.remedy, sink=sink, topic=topic, file=file)


def _print_report(
    arguments: argparse.Namespace, report: VerifyReport, repairs: Sequence[RepairResult], result: object, summary: str
) -> int:
    if arguments.json:
        error = None if report.equal else ErrorReport.of(VerifyMismatch(summary))
        _print_envelope(Envelope(command="verify", ok=report.equal, summary=summary, result=result, error=error))
    else:
        for one in repairs:
            line(LineMark.GOOD if one.equal else LineMark.BAD, one.summary)
        for verdict in report.tables:
            mark = LineMark.GOOD if verdict.equal else LineMark.BAD
            line(mark, f"{verdict.sink} {verdict.topic}: {verdict_text(verdict)}")
            _print_keys(verdict)
        fix = None if report.equal else _remedy(report, str(arguments.config))
        line(LineMark.GOOD if report.equal else LineMark.BAD, report.summary, fix=fix)
    return int((ExitCode.OK if report.equal else ExitCode.FINDING).value)


def _print_keys(verdict: TableVerdict) -> None:
    for key in verdict.missing:
        print("    missing  ", key)  # noqa: T201
    for key in verdict.extra:
        print("    extra    ", key)  # noqa: T201
    for entry in verdict.differing:
        print("    differing", entry["key"], "in", ", ".join(entry["columns"]))  # noqa: T201
    for parked in verdict.parked_keys:
        print("    parked   ", parked)  # noqa: T201


def verdict_text(verdict: TableVerdict) -> str:
    """Return a verdict as one line of text, without the sink and the table."""
    parked = f", {verdict.parked:,} keys parked" if verdict.parked else ""
    found = [f"{count:,} {kind}" for kind, count in verdict.counts.items() if count]
    if found:
        found[0] = found[0] if verdict.complete else f"at least {found[0]}"
        return f"{verdict.rows:,} rows, {', '.join(found)}{parked}"
    if not verdict.compared:
        return f"{verdict.state}, {complete_remedy(verdict.reason or '', sink=verdict.sink, topic=verdict.topic)}"
    if not verdict.equal:
        reason = f", {verdict.reason}" if verdict.reason else ""
        return f"{verdict.rows:,} rows expected, {verdict.target_rows:,} in the target{reason}"
    if verdict.mode == VerifyMode.COUNT:
        return f"{verdict.rows:,} rows expected and in the target"
    by_digest = " by digest" if verdict.mode == VerifyMode.CHECKSUM else ""
    reason = f", {verdict.reason}" if verdict.reason else ""
    return f"{verdict.rows:,} rows equal{by_digest}{parked}{reason}"


def _print_envelope(envelope: Envelope) -> None:
    print(envelope, flush=True)  # noqa: T201
