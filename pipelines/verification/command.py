"""Command: `verify` as it was asked for, checked before anything is opened, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from pydantic_core import PydanticCustomError

from cdc.config import load_definition
from cdc.config.units import seconds
from cdc.config.verify_options import Against, VerifyMode
from cdc.errors import ConfigError, ExitCode, VerifyMismatch
from cdc.remedy import complete_remedy
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
    rhythm = _rhythm(asked)
    if options.against is Against.LOG and (asked.repair or rhythm is not None):
        wrong = "--repair reads the source again" if asked.repair else "--every goes by what the source has"
        raise ConfigError(
            f"{wrong}, and --against log leaves it alone",
            remedy="leave one of them out; 'cdc replay SINK' builds a target anew from the log",
        )
    if rhythm is not None:
        return _continuously(asked, options, rhythm)
    if asked.repair:
        mended = repair(load_definition(asked.config), options)
        return _told(asked, mended.report, mended.mended, mended.to_json(), mended.summary)
    report = verify(load_definition(asked.config), options)
    return _told(asked, report, (), report.to_json(), report.summary)


def _rhythm(asked: argparse.Namespace) -> VerificationSchedule | None:
    if asked.rate is not None and asked.rate < 1:
        raise ConfigError(f"--rate {asked.rate}: expected at least 1 row per second")
    if asked.every is None:
        if asked.rate is not None:
            raise ConfigError("--rate goes with --every", remedy="say how often, as --every 1h")
        return None
    try:
        every = seconds(asked.every)
    except PydanticCustomError as error:
        raise ConfigError(f"--every {asked.every!r}: {error.message()}", remedy="write 30m or 1h") from None
    if every < LEAST:
        raise ConfigError(f"--every {asked.every!r}: expected at least {LEAST:.0f}s")
    if asked.mode == VerifyMode.COUNT:
        raise ConfigError(
            "--every keeps what is proven, and equal counts prove nothing", remedy="--mode rows or --mode checksum"
        )
    return VerificationSchedule(every=every, rate=asked.rate, repair=asked.repair)


def _continuously(asked: argparse.Namespace, options: VerifyOptions, rhythm: VerificationSchedule) -> int:
    definition = load_definition(asked.config)
    work = ContinuousVerification(definition, options, rhythm, _say_json if asked.json else _say)
    work.run()
    return int((ExitCode.FINDING if work.wrong else ExitCode.OK).value)


def _say_json(told: RangeResult) -> None:
    if told.error is not None:
        error = ErrorReport.of(told.error)
        _emit(Envelope(command="verify", ok=False, summary=told.error.message, error=error))
    elif told.verdict is not None:
        wrong = None if told.verdict.equal else ErrorReport.of(VerifyMismatch(_summary(told)))
        _emit(Envelope(command="verify", ok=wrong is None, summary=_summary(told), result=told.to_json(), error=wrong))


def _say(told: RangeResult) -> None:
    if told.error is not None:
        line(LineMark.ADVICE, told.error.message, fix=told.error.fix)
    elif told.verdict is not None:
        line(LineMark.GOOD if told.verdict.equal else LineMark.BAD, _summary(told))
        _print_keys(told.verdict)


def _summary(told: RangeResult) -> str:
    assert told.verdict is not None  # noqa: S101 - both callers looked
    text = f"{told.verdict.sink} {told.verdict.topic}: {words(told.verdict)}"
    if told.found is None or (told.found.first is None and told.found.ended is None):
        return text
    return f"{text} from {told.found.first or 'the beginning'} to {told.found.ended or 'the end'}"


def _next(report: VerifyReport, file: str) -> str:
    """What to do; where one table alone is wrong, about that one."""
    wrong = [(verdict.sink, verdict.topic) for verdict in report.tables if not verdict.equal]
    sink, topic = wrong[0] if len(wrong) == 1 else (None, None)
    return complete_remedy(VerifyMismatch.remedy, sink=sink, topic=topic, file=file)


def _told(
    asked: argparse.Namespace, report: VerifyReport, mended: Sequence[RepairResult], result: object, summary: str
) -> int:
    if asked.json:
        error = None if report.equal else ErrorReport.of(VerifyMismatch(summary))
        _emit(Envelope(command="verify", ok=report.equal, summary=summary, result=result, error=error))
    else:
        for one in mended:
            line(LineMark.GOOD if one.equal else LineMark.BAD, one.summary)
        for verdict in report.tables:
            line(LineMark.GOOD if verdict.equal else LineMark.BAD, f"{verdict.sink} {verdict.topic}: {words(verdict)}")
            _print_keys(verdict)
        fix = None if report.equal else _next(report, str(asked.config))
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
    untold = f", {verdict.reason}" if verdict.reason else ""
    return f"{verdict.rows:,} rows equal{how}{apart}{untold}"


def _emit(envelope: Envelope) -> None:
    print(envelope, flush=True)  # noqa: T201
