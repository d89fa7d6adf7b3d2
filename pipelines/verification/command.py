"""Command: `verify` as it was asked for, checked before anything is opened, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from pydantic_core import PydanticCustomError

from cdc.config import load_definition
from cdc.config.job_options import Against, VerifyMode
from cdc.config.units import seconds
from cdc.errors import ConfigError, ExitCode, VerifyMismatch, complete_remedy
from cdc.terminal_output import Envelope, ErrorReport, LineMark, line
from pipelines.verification.continuous import ContinuousVerification, RangeResult, VerificationSchedule
from pipelines.verification.repair import RepairResult, repair
from pipelines.verification.verdict import TableVerdict, VerifyReport
from pipelines.verification.verify import VerifyOptions, verify

LEAST: Final = 1.0
"""Seconds between two passes at least: each takes a slot on the source."""


def run(asked: argparse.Namespace) -> int:
    """Verify, once or until stopped; the exit status. Raises ConfigError for what does not go together."""
    options = VerifyOptions(
        tables=tuple(asked.tables),
        sinks=tuple(asked.sink),
        timeout=asked.timeout,
        mode=VerifyMode(asked.mode),
        against=Against(asked.against),
    )
    schedule = _rhythm(asked)
    if options.against is Against.LOG and (asked.repair or schedule is not None):
        wrong = "--repair" if asked.repair else "--every"
        raise ConfigError(
            f"{wrong} reads the source, which --against log does not do",
            remedy="omit one of them; 'cdc replay SINK' rebuilds a target from the log",
        )
    if schedule is not None:
        return _continuously(asked, options, schedule)
    if asked.repair:
        outcome = repair(load_definition(asked.config), options)
        return _print_report(asked, outcome.report, outcome.repairs, outcome.to_json(), outcome.summary)
    report = verify(load_definition(asked.config), options)
    return _print_report(asked, report, (), report.to_json(), report.summary)


def _rhythm(asked: argparse.Namespace) -> VerificationSchedule | None:
    if asked.rate is not None and asked.rate < 1:
        raise ConfigError(f"--rate {asked.rate}: expected at least 1 row per second")
    if asked.every is None:
        if asked.rate is not None:
            raise ConfigError("--rate requires --every", remedy="add an interval, for example --every 1h")
        return None
    try:
        every = seconds(asked.every)
    except PydanticCustomError as error:
        raise ConfigError(f"--every {asked.every!r}: {error.message()}", remedy="write 30m or 1h") from None
    if every < LEAST:
        raise ConfigError(f"--every {asked.every!r}: expected at least {LEAST:.0f}s")
    if asked.mode == VerifyMode.COUNT:
        raise ConfigError(
            "--every records verified ranges, and equal counts verify nothing",
            remedy="write --mode rows or --mode checksum",
        )
    return VerificationSchedule(every=every, rate=asked.rate, repair=asked.repair)


def _continuously(asked: argparse.Namespace, options: VerifyOptions, schedule: VerificationSchedule) -> int:
    definition = load_definition(asked.config)
    work = ContinuousVerification(definition, options, schedule, _print_range_json if asked.json else _print_range)
    work.run()
    return int((ExitCode.FINDING if work.wrong else ExitCode.OK).value)


def _print_range_json(range_result: RangeResult) -> None:
    if range_result.error is not None:
        error = ErrorReport.of(range_result.error)
        _emit(Envelope(command="verify", ok=False, summary=range_result.error.message, error=error))
    elif range_result.verdict is not None:
        wrong = None if range_result.verdict.equal else ErrorReport.of(VerifyMismatch(_summary(range_result)))
        _emit(
            Envelope(
                command="verify",
                ok=wrong is None,
                summary=_summary(range_result),
                result=range_result.to_json(),
                error=wrong,
            )
        )


def _print_range(range_result: RangeResult) -> None:
    if range_result.error is not None:
        line(LineMark.ADVICE, range_result.error.message, fix=range_result.error.fix)
    elif range_result.verdict is not None:
        line(LineMark.GOOD if range_result.verdict.equal else LineMark.BAD, _summary(range_result))
        _print_keys(range_result.verdict)


def _summary(range_result: RangeResult) -> str:
    assert range_result.verdict is not None  # noqa: S101 - both callers looked
    text = f"{range_result.verdict.sink} {range_result.verdict.topic}: {words(range_result.verdict)}"
    if range_result.found is None or (range_result.found.first is None and range_result.found.ended is None):
        return text
    return f"{text} from {range_result.found.first or 'the beginning'} to {range_result.found.ended or 'the end'}"


def _remedy(report: VerifyReport, file: str) -> str:
    """What to do; where one table alone is wrong, about that one."""
    wrong = [(verdict.sink, verdict.topic) for verdict in report.tables if not verdict.equal]
    sink, topic = wrong[0] if len(wrong) == 1 else (None, None)
    return complete_remedy(VerifyMismatch.remedy, sink=sink, topic=topic, file=file)


def _print_report(
    asked: argparse.Namespace, report: VerifyReport, repairs: Sequence[RepairResult], result: object, summary: str
) -> int:
    if asked.json:
        error = None if report.equal else ErrorReport.of(VerifyMismatch(summary))
        _emit(Envelope(command="verify", ok=report.equal, summary=summary, result=result, error=error))
    else:
        for one in repairs:
            line(LineMark.GOOD if one.equal else LineMark.BAD, one.summary)
        for verdict in report.tables:
            line(LineMark.GOOD if verdict.equal else LineMark.BAD, f"{verdict.sink} {verdict.topic}: {words(verdict)}")
            _print_keys(verdict)
        fix = None if report.equal else _remedy(report, str(asked.config))
        line(LineMark.GOOD if report.equal else LineMark.BAD, report.summary, fix=fix)
    return int((ExitCode.OK if report.equal else ExitCode.FINDING).value)


def _print_keys(verdict: TableVerdict) -> None:
    for entry in verdict.missing:
        print("    missing  ", entry)  # noqa: T201
    for entry in verdict.extra:
        print("    extra    ", entry)  # noqa: T201
    for found in verdict.differing:
        print("    differing", found["key"], "in", ", ".join(found["columns"]))  # noqa: T201
    for parked in verdict.parked_keys:
        print("    parked   ", parked)  # noqa: T201


def words(verdict: TableVerdict) -> str:
    """What came of one table, for a person."""
    apart = f", {verdict.parked:,} keys parked" if verdict.parked else ""
    found = [f"{count:,} {kind}" for kind, count in verdict.counts.items() if count]
    if found:
        found[0] = found[0] if verdict.complete else f"at least {found[0]}"
        return f"{verdict.rows:,} rows, {', '.join(found)}{apart}"
    if not verdict.compared:
        return f"{verdict.state}, {complete_remedy(verdict.reason or '', sink=verdict.sink, topic=verdict.topic)}"
    if not verdict.equal:
        why = f", {verdict.reason}" if verdict.reason else ""
        return f"{verdict.rows:,} rows and {verdict.target_rows:,} in the target{why}"
    if verdict.mode == VerifyMode.COUNT:
        return f"{verdict.rows:,} rows on both sides"
    how = " by digest" if verdict.mode == VerifyMode.CHECKSUM else ""
    reason = f", {verdict.reason}" if verdict.reason else ""
    return f"{verdict.rows:,} rows equal{how}{apart}{reason}"


def _emit(envelope: Envelope) -> None:
    print(envelope, flush=True)  # noqa: T201
