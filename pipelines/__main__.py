"""`python -m pipelines apply|verify|replay -c FILE`: the verbs that the connector's commands start as children."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from cdc.cli.output import DEFAULT_CONFIG, Envelope, ErrorReport, Mark, fail, line
from cdc.config import load
from cdc.errors import CdcError, ExitCode, SinkError, VerifyMismatch

INTERRUPTED: Final = 130
"""128 + SIGINT, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; hands back its exit status: 0 done, 1 failed, 2 usage, 3 surroundings, 4 a difference."""
    asked = _parser().parse_args(arguments)
    try:
        return int(asked.run(asked))
    except CdcError as error:
        fail(asked.verb, error, json=getattr(asked, "json", False))
        return int(error.exit_code.value)
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipelines", description="Apply a log, verify or rebuild its sinks."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    apply = verbs.add_parser("apply", help="apply the log to every sink until stopped")
    apply.set_defaults(run=_apply)
    verify = verbs.add_parser("verify", help="compare every row and column of every sink with the source")
    verify.set_defaults(run=_verify)
    verify.add_argument("tables", nargs="*", metavar="TABLE", help="globs over schema.table; default all")
    verify.add_argument("--sink", action="append", default=[], help="only this sink; may be repeated")
    verify.add_argument("--timeout", type=float, default=60.0, help="seconds until the sinks must stand at the cut")
    verify.add_argument(
        "--repair", action="store_true", help="read the rows that differ again, by key, and compare again"
    )
    verify.add_argument("--json", action="store_true", help="print one JSON envelope")
    replay = _replay_parser(verbs)
    for verb in (apply, verify, replay):
        verb.add_argument("-c", "--config", type=Path, default=DEFAULT_CONFIG, help="the definition")
    return parser


def _replay_parser(verbs: Any) -> argparse.ArgumentParser:
    replay: argparse.ArgumentParser = verbs.add_parser("replay", help="build a sink's target anew from the log alone")
    replay.set_defaults(run=_replay)
    replay.add_argument("sink", metavar="SINK", help="as the definition names it")
    replay.add_argument("--from", dest="start", default="beginning", help="a position, an ISO 8601 time, or beginning")
    replay.add_argument("--to", dest="end", default="latest", help="a position, an ISO 8601 time, or latest")
    replay.add_argument("--tables", action="append", default=[], help="only these, a glob; may be repeated")
    replay.add_argument("--into", metavar="PATH", help="keep the new target there and leave the old one alone")
    replay.add_argument("--dry-run", action="store_true", help="print rows, bytes and time, do nothing")
    replay.add_argument("--json", action="store_true", help="print one JSON envelope")
    return replay


def _apply(asked: argparse.Namespace) -> int:
    # late: verify must not wait for Spark, apply not for what verify reads with
    return int(import_module("pipelines.driver").main(load(asked.config)))


def _verify(asked: argparse.Namespace) -> int:
    verify = import_module("pipelines.verify")
    options = verify.VerifyOptions(tuple(asked.tables), tuple(asked.sink), asked.timeout)
    if asked.repair:
        outcome = import_module("pipelines.repair").repair(load(asked.config), options)
    else:
        outcome = verify.verify(load(asked.config), options)
    if asked.json:
        _print_json(outcome)
    else:
        _print(outcome.report if asked.repair else outcome, outcome.mended if asked.repair else ())
    return int((ExitCode.OK if outcome.equal else ExitCode.FINDING).value)


def _replay(asked: argparse.Namespace) -> int:
    replay = import_module("pipelines.replay")
    options = replay.ReplayOptions(
        sink=asked.sink,
        start=asked.start,
        end=asked.end,
        tables=tuple(asked.tables),
        into=asked.into,
        dry_run=asked.dry_run,
    )
    say = (lambda _text: None) if asked.json else (lambda text: line(Mark.GOOD, text))
    report = replay.replay(load(asked.config), options, say)
    if asked.json:
        error = None if report.ok else ErrorReport.of(SinkError(report.summary))
        summary, result = report.summary, report.to_json()
        print(Envelope(command="replay", ok=report.ok, summary=summary, result=result, error=error), flush=True)  # noqa: T201
    else:
        _print_replay(report)
    return int((ExitCode.OK if report.ok else ExitCode.RUNTIME).value)


def _print_replay(report: Any) -> None:
    for table in report.tables:
        if report.dry_run:
            estimate = f"{table.rows:>14,} rows {table.bytes:>16,} bytes {table.seconds:>8,.0f} s"
            line(Mark.GOOD, f"{table.topic:32} {estimate}")
        elif table.reason:
            line(Mark.BAD, f"{table.topic}: {table.state}, {table.reason}")
    line(Mark.GOOD if report.ok else Mark.BAD, report.summary)


def _print_json(report: Any) -> None:
    error = None if report.equal else ErrorReport.of(VerifyMismatch(report.summary))
    result = report.to_json()
    print(Envelope(command="verify", ok=report.equal, summary=report.summary, result=result, error=error), flush=True)  # noqa: T201


def _print(report: Any, mended: Sequence[Any]) -> None:
    for one in mended:
        line(Mark.GOOD if one.equal else Mark.BAD, one.summary)
    for verdict in report.tables:
        line(Mark.GOOD if verdict.equal else Mark.BAD, f"{verdict.sink} {verdict.topic}: {_words(verdict)}")
        for entry in verdict.missing:
            print("    missing  ", entry)  # noqa: T201
        for entry in verdict.extra:
            print("    extra    ", entry)  # noqa: T201
        for entry in verdict.differing:
            print("    differing", entry["key"], "in", ", ".join(entry["columns"]))  # noqa: T201
    line(Mark.GOOD if report.equal else Mark.BAD, report.summary, fix=None if report.equal else VerifyMismatch.remedy)


def _words(verdict: Any) -> str:
    found = [f"{count:,} {kind}" for kind, count in verdict.counts.items() if count]
    if found:
        found[0] = found[0] if verdict.complete else f"at least {found[0]}"
        return f"{verdict.rows:,} rows, {', '.join(found)}"
    if verdict.reason:
        return f"{verdict.state}, {verdict.reason}"
    return f"{verdict.rows:,} rows equal"


if __name__ == "__main__":
    sys.exit(main())
