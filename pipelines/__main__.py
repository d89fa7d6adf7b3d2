"""The command line `python -m pipelines VERB -c FILE`. Some commands of cdc run it as a child process.

The verbs are apply, verify, replay, compact, copy, check and move.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from cdc import DEFAULT_CONFIG
from cdc.cluster.spark_submit_command import ONCE, checked_trigger, chosen_sinks
from cdc.command_output import Envelope, ErrorReport, LineMark, emit, error_to_report, fail, line
from cdc.config import Definition, issues_in_file, load_definition
from cdc.config.units import seconds
from cdc.errors import ExitCode, InvalidDefinition, SinkError, complete_remedy, process_exit_code
from cdc.file_modes import product_umask
from cdc.garbage import collect_garbage_rarely
from cdc.logging_setup import configure_by_environment
from cdc.process_exit import exit_process
from cdc.verify_and_replay_options import Against, VerifyMode

INTERRUPTED: Final = 130
"""Exit status after SIGINT: 128 + 2, as shells report it."""


def main(argv: Sequence[str] | None = None, *, submitted: bool = False) -> int:
    """Run one command and return its exit status.

    0 is success, 1 a failure, 2 wrong usage, 3 a problem of the environment, 4 a mismatch. Outside a cluster, `apply`
    without `--once` returns 5 instead of 1 if a restart does not resolve the error.
    `submitted` is True if spark-submit started the process on a cluster. Without `argv` and outside a cluster, `apply`
    does not return: it ends the process.
    """
    if argv is None:
        atexit.register(gc.freeze)  # as in cdc/__main__.py
        collect_garbage_rarely()
    arguments = _parser().parse_args(argv, argparse.Namespace(submitted=submitted))
    status = _run(arguments)
    if argv is None and not submitted and arguments.verb == "apply":  # a cluster may run several jobs in one process
        exit_process(status)
    return status


def _run(arguments: argparse.Namespace) -> int:
    """Run the verb with its arguments, and return the exit status."""
    try:
        with product_umask():
            return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as exc:  # noqa: BLE001 - every error is reported with a code
        error = error_to_report(exc, logs=arguments.verb == "apply")
        error.fix = complete_remedy(error.fix, file=str(arguments.config))
        fail(arguments.verb, error, json=getattr(arguments, "json", False))
        is_process = arguments.verb == "apply" and arguments.trigger != ONCE and not arguments.submitted
        return int((process_exit_code(error) if is_process else error.exit_code).value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipelines", description="Apply a change log to sinks, verify or rebuild them."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    apply = verbs.add_parser("apply", help="apply the change log to every sink until the process is stopped")
    apply.set_defaults(run=_apply)
    apply.add_argument("--sink", action="append", default=[], help="fill only this sink; may be repeated")
    apply.add_argument(
        "--trigger",
        metavar="TIME|once",
        help="set the time between the starts of two batches; "
        "with 'once', apply the changes that the log has now, then exit",
    )
    apply.add_argument(
        "--once",
        dest="trigger",
        action="store_const",
        const="once",
        help="apply the changes that the log has now, then exit",
    )
    verify = _verify_parser(verbs)
    replay = _replay_parser(verbs)
    compact = verbs.add_parser("compact", help="fold the closed segments of the log into its compacted table")
    compact.set_defaults(run=_compact)
    compact.add_argument(
        "--everything", "--all", action="store_true", help="also fold the segment that is being written"
    )
    compact.add_argument("--json", action="store_true", help="print one JSON envelope")
    copy = verbs.add_parser("copy", help="let executors read the chunks of copies until no copy is pending")
    copy.set_defaults(run=_copy)
    copy.add_argument(
        "--connections",
        type=int,
        metavar="N",
        help="read over at most this many connections at a time; default: the cores of the cluster, at most 32",
    )
    copy.add_argument("--json", action="store_true", help="print one JSON envelope")
    check = verbs.add_parser(
        "check", help="check the expressions and columns of sink rules with Spark, as 'cdc doctor --rules' does"
    )
    check.set_defaults(run=_check)
    check.add_argument("--json", action="store_true", help="print one JSON envelope")
    move = _move_parser(verbs)
    for verb in (apply, verify, replay, compact, copy, check, move):
        verb.add_argument(
            "-c", "--config", type=Path, default=DEFAULT_CONFIG, help="read the pipeline from this definition file"
        )
    return parser


def _verify_parser(verbs: Any) -> argparse.ArgumentParser:
    verify: argparse.ArgumentParser = verbs.add_parser("verify", help="compare the sinks with the source or the log")
    # imported late, as the other verbs; that module checks the combination of options
    verify.set_defaults(run=lambda arguments: import_module("pipelines.verification.command").run(arguments))
    verify.add_argument(
        "tables",
        nargs="*",
        metavar="TABLE",
        help="compare only tables whose schema.table matches one of these globs; default: all tables",
    )
    verify.add_argument("--sink", action="append", default=[], help="compare only this sink; may be repeated")
    verify.add_argument(
        "--mode",
        choices=[choice.value for choice in VerifyMode],
        default=VerifyMode.ROWS.value,
        help="compare rows, digests or counts; default: rows",
    )
    verify.add_argument(
        "--against",
        choices=[choice.value for choice in Against],
        default=Against.SOURCE.value,
        help="compare with the source or the log; default: the source",
    )
    verify.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        help="wait at most this many seconds for the sinks to reach the common position",
    )
    verify.add_argument(
        "--every", metavar="TIME", help="compare each table once per interval (30m, 1h) until the process is stopped"
    )
    verify.add_argument(
        "--rate", type=int, metavar="ROWS", help="read at most this many rows per second; only with --every"
    )
    verify.add_argument(
        "--repair",
        action="store_true",
        help="correct the sink: let the reader read the differing rows again by key, then compare once more",
    )
    # the server process starts it: rounds within the budget of the key 'verify', until nothing is due for a while
    verify.add_argument("--scheduled", action="store_true", help=argparse.SUPPRESS)
    verify.add_argument(
        "--json", action="store_true", help="print one JSON envelope; with --every, print one for each range of keys"
    )
    return verify


def _move_parser(verbs: Any) -> argparse.ArgumentParser:
    move: argparse.ArgumentParser = verbs.add_parser("move", help="continue the log on another source server")
    # the name in the output is that of the command of cdc
    move.set_defaults(
        run=lambda arguments: import_module("pipelines.verification.move_source").run(arguments), verb="source move"
    )
    # cdc passes the DSN in its environment variable, so that a password is in no list of processes
    given = os.environ.get("CDC_MOVE_TO")
    move.add_argument("--to", default=given, required=given is None, help="DSN of the new server; or $CDC_MOVE_TO")
    move.add_argument("--check", action="store_true", help="only compare; change nothing")
    move.add_argument("--resync", action="store_true", help="copy tables that differ, instead of refusing the move")
    move.add_argument("--json", action="store_true", help="print one JSON envelope")
    return move


def _replay_parser(verbs: Any) -> argparse.ArgumentParser:
    replay: argparse.ArgumentParser = verbs.add_parser("replay", help="rebuild the target of a sink from the log alone")
    replay.set_defaults(run=_replay)
    replay.add_argument("sink", metavar="SINK", help="rebuild this sink of the definition")
    replay.add_argument(
        "--from", dest="start", default="beginning", help="begin at this position or ISO 8601 time, or at 'beginning'"
    )
    replay.add_argument(
        "--to", dest="end", default="latest", help="end at this position (included) or ISO 8601 time, or at 'latest'"
    )
    replay.add_argument(
        "--tables", action="append", default=[], help="rebuild only tables that match this glob; may be repeated"
    )
    replay.add_argument("--into", metavar="PATH", help="write the new target to this directory and keep the old one")
    replay.add_argument(
        "--dry-run",
        action="store_true",
        help="print the rows, bytes and estimated time of the replay, and change nothing",
    )
    replay.add_argument("--json", action="store_true", help="print one JSON envelope")
    return replay


def _apply(arguments: argparse.Namespace) -> int:
    whole = load_definition(arguments.config)
    definition = _select_sinks(whole, arguments.sink, arguments.trigger)
    runtime = import_module("pipelines.runtime.spark_session")
    # the imports below take longer than a second
    runtime.start_jvm_early(runtime.SparkSettings.of(definition, f"cdc-{definition.name}"))
    # imported late: verify does not need Spark, and apply does not need the modules of verify
    apply_process, new_sink_check = (
        import_module("pipelines.apply_process"),
        import_module("pipelines.new_sink_check"),
    )
    import_module("cdc.allocators").use_system_allocators()
    new_sinks = new_sink_check.NewSinkCheck(whole, arguments.config, {sink.name for sink in definition.sinks})
    once = arguments.trigger == ONCE
    with ExitStack() as stack:
        # on a cluster a child process cannot read the definition file
        if not once and not arguments.submitted:
            index_rebuilds = import_module("pipelines.index_rebuilds")
            stack.enter_context(index_rebuilds.IndexRebuilds(definition, arguments.config))
        return int(apply_process.main(definition, once=once, check=new_sinks.check))


def _check(arguments: argparse.Namespace) -> int:
    definition = load_definition(arguments.config)
    new_sink_check = import_module("pipelines.new_sink_check")
    unwritable_tables = import_module("cdc.targets.unwritable_tables")
    defined = import_module("cdc.capture.startup_checks").defined_tables(definition)
    tables = list(unwritable_tables.tables_of_sinks(definition, defined, {sink.name for sink in definition.sinks}))
    with _spark_at_first_call(new_sink_check.local_settings(definition)) as session:
        conflicts = new_sink_check.find_unresolved_rules(tables, session)
    if conflicts:
        raise InvalidDefinition.from_issues(issues_in_file(arguments.config, conflicts))
    emit(
        "check", json=arguments.json, summary=f"Spark resolved the rules of {len(tables)} tables", result={"flaws": []}
    )
    return int(ExitCode.OK.value)


@contextmanager
def _spark_at_first_call(settings: Any) -> Iterator[Callable[[], Any]]:
    """Yield a function that returns the Spark session, which its first call starts and the end of the block stops.

    settings: a SparkSettings.
    """
    with ExitStack() as stack:

        @cache
        def session() -> Any:
            spark = import_module("pipelines.runtime.spark_session").spark_session(settings)
            stack.callback(spark.stop)
            return spark

        yield session


def _select_sinks(definition: Definition, names: Sequence[str], trigger: str | None) -> Definition:
    """Return the definition with only the named sinks and, if `trigger` is a duration, with this batch interval.

    names: empty for all sinks. trigger: a duration, None or `once`; the last two leave the batch interval unchanged.
    Raises ConfigError for an unknown sink and for any other trigger.
    """
    sinks, spark = chosen_sinks(definition, names), definition.spark
    if checked_trigger(trigger) not in {None, ONCE}:
        spark = spark.model_copy(update={"trigger": seconds(trigger)})
    return definition.model_copy(update={"sinks": sinks, "spark": spark})


def _replay(arguments: argparse.Namespace) -> int:
    replay = import_module("pipelines.replaying.replay")
    options = replay.ReplayOptions(
        sink=arguments.sink,
        start=arguments.start,
        end=arguments.end,
        tables=tuple(arguments.tables),
        into=arguments.into,
        dry_run=arguments.dry_run,
    )
    report_line = (lambda _text: None) if arguments.json else (lambda text: line(LineMark.GOOD, text))
    run_replay = (
        import_module("pipelines.submitted.replay_progress").replay_with_progress
        if arguments.submitted
        else replay.replay
    )
    report = run_replay(load_definition(arguments.config), options, report_line)
    if arguments.json:
        error = None if report.ok else ErrorReport.of(SinkError(report.summary))
        summary, result = report.summary, report.to_json()
        print(Envelope(command="replay", ok=report.ok, summary=summary, result=result, error=error), flush=True)  # noqa: T201
    else:
        _print_replay(arguments, report)
    return int((ExitCode.OK if report.ok else ExitCode.RUNTIME).value)


def _compact(arguments: argparse.Namespace) -> int:
    definition, job = load_definition(arguments.config), import_module("pipelines.compaction.compaction_steps")
    runtime = import_module("pipelines.runtime.spark_session")
    settings = runtime.SparkSettings.of(definition, f"cdc-{definition.name}-compact")
    # a submitted compaction always runs on executors, even if it is small
    limits = job.CompactionLimits(large=0) if arguments.submitted else job.CompactionLimits()
    with _spark_at_first_call(settings) as start:
        spark = start if settings.local and not arguments.submitted else start()
        outcome = job.compact(spark, definition.log.root, everything=arguments.everything, limits=limits)
    if arguments.json:
        print(Envelope(command="compact", ok=True, summary=outcome.summary, result=outcome.to_json()), flush=True)  # noqa: T201
    else:
        line(LineMark.GOOD, outcome.summary)
    return int(ExitCode.OK.value)


def _copy(arguments: argparse.Namespace) -> int:
    copy_chunks = import_module("pipelines.submitted.copy_chunks")
    report_line = (lambda _text: None) if arguments.json else (lambda text: line(LineMark.GOOD, text))
    report = copy_chunks.copy_by_executors(load_definition(arguments.config), arguments.connections, report_line)
    emit("copy", json=arguments.json, summary=report.summary, result=report.to_json())
    return int(ExitCode.OK.value)


def _print_replay(arguments: argparse.Namespace, report: Any) -> None:
    for table in report.tables:
        if report.dry_run:
            estimate = f"{table.rows:>14,} rows {table.bytes:>16,} bytes {table.seconds:>8,.0f} s"
            line(LineMark.GOOD, f"{table.topic:32} {estimate}")
        elif table.reason:
            reason = complete_remedy(table.reason, sink=arguments.sink, topic=table.topic, file=str(arguments.config))
            line(LineMark.BAD, f"{table.topic}: {table.state}, {reason}")
    for note in report.notes:
        line(LineMark.ADVICE, note)
    line(LineMark.GOOD if report.ok else LineMark.BAD, report.summary)


def _config_path(argv: Sequence[str]) -> str:
    """Return the path of the definition file as given on the command line. Remedies in log lines contain this path."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-c", "--config", default=str(DEFAULT_CONFIG))
    return str(parser.parse_known_args(argv)[0].config)


if __name__ == "__main__":
    configure_by_environment(_config_path(sys.argv[1:]))
    sys.exit(main())
