"""`python -m pipelines VERB -c FILE`: apply, verify, replay, compact, check, as the connector's commands start them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from cdc import DEFAULT_CONFIG
from cdc.cluster.job import ONCE, checked_trigger, chosen_sinks
from cdc.config import Definition, issues_in_file, load_definition
from cdc.config.units import seconds
from cdc.config.verify_options import Against, VerifyMode
from cdc.errors import ExitCode, InvalidDefinition, SinkError, process_exit_code
from cdc.failure_report import error_to_report
from cdc.private_files import product_umask
from cdc.process_logs import configure_by_environment
from cdc.remedy import complete_remedy
from cdc.terminal_output import Envelope, ErrorReport, LineMark, emit, fail, line

INTERRUPTED: Final = 130
"""128 + SIGINT, as shells have it."""


def main(arguments: Sequence[str] | None = None, *, submitted: bool = False) -> int:
    """Run one verb; hands back its exit status: 0 done, 1 failed, 2 usage, 3 surroundings, 4 a difference.

    An apply process that would run until it is stopped ends with 5 where 1 would be final.

    submitted: to a cluster, which waits for a session, and where nobody reads what is printed.
    """
    asked = _parser().parse_args(arguments, argparse.Namespace(submitted=submitted))
    try:
        with product_umask():
            return int(asked.run(asked))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as exc:  # noqa: BLE001 - reported with a code
        error = error_to_report(exc, logs=asked.verb == "apply")
        error.fix = complete_remedy(error.fix, file=str(asked.config))
        fail(asked.verb, error, json=getattr(asked, "json", False))
        is_process = asked.verb == "apply" and asked.trigger != ONCE and not submitted
        return int((process_exit_code(error) if is_process else error.exit_code).value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipelines", description="Apply a log, verify or rebuild its sinks."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    apply = verbs.add_parser("apply", help="apply the log to every sink until stopped")
    apply.set_defaults(run=_apply)
    apply.add_argument("--sink", action="append", default=[], help="only this sink; may be repeated")
    apply.add_argument(
        "--trigger", metavar="TIME|once", help="time between batches; once: apply what there is, and end"
    )
    apply.add_argument("--once", dest="trigger", action="store_const", const="once", help="as --trigger once")
    verify = _verify_parser(verbs)
    replay = _replay_parser(verbs)
    compact = verbs.add_parser("compact", help="fold what is cold of the log into its compacted table")
    compact.set_defaults(run=_compact)
    compact.add_argument("--everything", "--all", action="store_true", help="also the segment that is being written")
    compact.add_argument("--json", action="store_true", help="print one JSON envelope")
    check = verbs.add_parser("check", help="have Spark resolve what rules say of columns, as 'cdc doctor --rules' does")
    check.set_defaults(run=_check)
    check.add_argument("--json", action="store_true", help="print one JSON envelope")
    for verb in (apply, verify, replay, compact, check):
        verb.add_argument("-c", "--config", type=Path, default=DEFAULT_CONFIG, help="the definition")
    return parser


def _verify_parser(verbs: Any) -> argparse.ArgumentParser:
    verify: argparse.ArgumentParser = verbs.add_parser("verify", help="compare the sinks with the source or the log")
    # late, as the others; what does not go together is for that module to say
    verify.set_defaults(run=lambda asked: import_module("pipelines.verification.command").run(asked))
    verify.add_argument("tables", nargs="*", metavar="TABLE", help="globs over schema.table; default all")
    verify.add_argument("--sink", action="append", default=[], help="only this sink; may be repeated")
    verify.add_argument(
        "--mode",
        choices=[one.value for one in VerifyMode],
        default=VerifyMode.ROWS.value,
        help="how closely; default rows",
    )
    verify.add_argument(
        "--against", choices=[one.value for one in Against], default=Against.SOURCE.value, help="default the source"
    )
    verify.add_argument("--timeout", type=float, default=60.0, help="seconds until the sinks must stand at the cut")
    verify.add_argument("--every", metavar="TIME", help="go on, a pass over each table every so often: 30m, 1h")
    verify.add_argument("--rate", type=int, metavar="ROWS", help="with --every: rows per second at most")
    verify.add_argument(
        "--repair", action="store_true", help="read the rows that differ again, by key, and compare again"
    )
    verify.add_argument("--json", action="store_true", help="print one JSON envelope, with --every one for each range")
    return verify


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
    whole = load_definition(asked.config)
    definition = _narrowed(whole, asked.sink, asked.trigger)
    # late: verify must not wait for Spark, apply not for what verify reads with
    driver, checking = import_module("pipelines.driver"), import_module("pipelines.preflight")
    begun = checking.Beginning(whole, asked.config, {sink.name for sink in definition.sinks})
    return int(driver.main(definition, once=asked.trigger == ONCE, check=begun.check))


def _check(asked: argparse.Namespace) -> int:
    definition, checking = load_definition(asked.config), import_module("pipelines.preflight")
    starting, there = (
        import_module("pipelines.runtime.session"),
        import_module("cdc.capture.startup_checks").defined_tables(definition),
    )
    tables = list(
        import_module("cdc.stores.sink_preflight").fed(definition, there, {sink.name for sink in definition.sinks})
    )
    with ExitStack() as ended:

        @cache
        def session() -> Any:
            made = starting.spark_session(checking.local_settings(definition))
            ended.callback(made.stop)
            return made

        found = checking.unresolved(tables, session)
    if found:
        raise InvalidDefinition.from_issues(issues_in_file(asked.config, found))
    emit("check", json=asked.json, summary=f"rules of {len(tables)} targets resolved", result={"flaws": []})
    return int(ExitCode.OK.value)


def _narrowed(definition: Definition, wanted: Sequence[str], trigger: str | None) -> Definition:
    """The definition as one process is to carry it out; raises ConfigError for a sink that it does not name."""
    sinks, spark = chosen_sinks(definition, wanted), definition.spark
    if checked_trigger(trigger) not in {None, ONCE}:
        spark = spark.model_copy(update={"trigger": seconds(trigger)})
    return definition.model_copy(update={"sinks": sinks, "spark": spark})


def _replay(asked: argparse.Namespace) -> int:
    replay = import_module("pipelines.replaying.replay")
    options = replay.ReplayOptions(
        sink=asked.sink,
        start=asked.start,
        end=asked.end,
        tables=tuple(asked.tables),
        into=asked.into,
        dry_run=asked.dry_run,
    )
    say = (lambda _text: None) if asked.json else (lambda text: line(LineMark.GOOD, text))
    carry_out = import_module("pipelines.submitted.replay_progress").replayed if asked.submitted else replay.replay
    report = carry_out(load_definition(asked.config), options, say)
    if asked.json:
        error = None if report.ok else ErrorReport.of(SinkError(report.summary))
        summary, result = report.summary, report.to_json()
        print(Envelope(command="replay", ok=report.ok, summary=summary, result=result, error=error), flush=True)  # noqa: T201
    else:
        _print_replay(asked, report)
    return int((ExitCode.OK if report.ok else ExitCode.RUNTIME).value)


def _compact(asked: argparse.Namespace) -> int:
    definition, job = load_definition(asked.config), import_module("pipelines.compaction.compact")
    root, session = definition.log.root, None
    # whoever submits it wants executors to do it, however little there is
    limits = job.CompactionLimits(large=0) if asked.submitted else job.CompactionLimits()
    if asked.submitted or job.is_large(root, everything=asked.everything):
        starting = import_module("pipelines.runtime.session")
        session = starting.spark_session(starting.SparkSettings.of(definition, f"cdc-{definition.name}-compact"))
    try:
        outcome = job.compact(session, root, everything=asked.everything, limits=limits)
    finally:
        if session is not None:
            session.stop()
    if asked.json:
        print(Envelope(command="compact", ok=True, summary=outcome.summary, result=outcome.to_json()), flush=True)  # noqa: T201
    else:
        line(LineMark.GOOD, outcome.summary)
    return int(ExitCode.OK.value)


def _print_replay(asked: argparse.Namespace, report: Any) -> None:
    for table in report.tables:
        if report.dry_run:
            estimate = f"{table.rows:>14,} rows {table.bytes:>16,} bytes {table.seconds:>8,.0f} s"
            line(LineMark.GOOD, f"{table.topic:32} {estimate}")
        elif table.reason:
            why = complete_remedy(table.reason, sink=asked.sink, topic=table.topic, file=str(asked.config))
            line(LineMark.BAD, f"{table.topic}: {table.state}, {why}")
    for note in report.notes:
        line(LineMark.ADVICE, note)
    line(LineMark.GOOD if report.ok else LineMark.BAD, report.summary)


def _named_file(given: Sequence[str]) -> str:
    """The definition, as the log's remedies name it."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-c", "--config", default=str(DEFAULT_CONFIG))
    return str(parser.parse_known_args(given)[0].config)


if __name__ == "__main__":
    configure_by_environment(_named_file(sys.argv[1:]))
    sys.exit(main())
