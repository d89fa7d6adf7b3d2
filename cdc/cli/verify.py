"""`cdc verify`: compare every row and column of every sink with the source, or with the log."""

from __future__ import annotations

from typing import Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.errors import ConfigError

TablesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TABLE]...", help="Verify these tables; write schema.table, where * and ? are wildcards."),
]
SinksOption = Annotated[list[str] | None, typer.Option("--sink", help="Verify only this sink; may be repeated.")]
ModeOption = Annotated[
    str,
    typer.Option(
        "--mode",
        metavar="rows|checksum|count",
        help="Choose what to compare: 'rows' compares rows and names those that differ, 'checksum' compares one "
        "digest per table, 'count' compares numbers of rows.",
    ),
]
AgainstOption = Annotated[
    str,
    typer.Option(
        "--against",
        metavar="source|log",
        help="Compare with the source or with the log; 'log' needs neither the source nor 'cdc run'.",
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", min=1, help="Wait at most this many seconds for the sinks to reach the common position."),
]
EveryOption = Annotated[
    str | None,
    typer.Option(
        "--every",
        metavar="TIME",
        help="Repeat until stopped, and compare every row once per interval, for example 30m or 1h.",
    ),
]
RateOption = Annotated[
    int | None,
    typer.Option(
        "--rate", metavar="ROWS", help="Read at most this many rows per second from the source; only with --every."
    ),
]
RepairOption = Annotated[
    bool,
    typer.Option(
        "--repair",
        help="Correct the sink: let the reader read the differing rows from the source again, then compare once more.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command `verify` to the app."""
    app.command()(verify)


def verify(  # noqa: PLR0913, PLR0917 - one parameter per option
    tables: TablesArgument = None,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: SinksOption = None,
    mode: ModeOption = "rows",
    against: AgainstOption = "source",
    timeout: TimeoutOption = 60.0,
    every: EveryOption = None,
    rate: RateOption = None,
    repair: RepairOption = False,
    json: JsonOption = False,
) -> None:
    """Compare every sink with the source at one position.

    The command exits with status 4 if a row or a column differs. With --repair the running reader corrects the sink: it
    writes missing and wrong rows, and deletes rows that the source does not have. The exit status is then the status of
    the last comparison. With --every the command repeats until SIGTERM, and the next start continues after the last
    verified range. 'cdc status' shows the time up to which each table is verified.
    """
    import sys

    from cdc.verify_and_replay_options import Against, VerifyMode

    _check_choice("--mode", mode, [one.value for one in VerifyMode])
    _check_choice("--against", against, [one.value for one in Against])
    options = [f"--sink={name}" for name in sink or ()]
    options += [f"--mode={mode}", f"--against={against}", f"--timeout={timeout}"]
    options += [*([f"--every={every}"] if every is not None else []), *([f"--rate={rate}"] if rate is not None else [])]
    options += [*(["--repair"] if repair else []), *(["--json"] if json else []), "--", *(tables or ())]
    command = [sys.executable, "-m", "pipelines", "verify", "-c", str(config), *options]
    # a child process: this package imports neither Spark nor the code of targets
    raise typer.Exit(_run_child(command))


def _check_choice(option: str, word: str, known: list[str]) -> None:
    """Raise ConfigError if `word` is not in `known`.

    The check is here because an error of the child process would not name `cdc verify`.
    """
    if word not in known:
        expected = ", ".join(map(repr, known))
        raise ConfigError(
            f"invalid value for '{option}': {word!r} is not one of {expected}", remedy="run 'cdc verify --help'"
        )


def _run_child(command: list[str]) -> int:
    """Run a child process, pass SIGTERM and SIGINT on to it, and return its exit status."""
    import signal
    import subprocess

    ending = (signal.SIGTERM, signal.SIGINT)
    with subprocess.Popen(command) as child:
        before = {number: signal.signal(number, lambda sent, _frame: child.send_signal(sent)) for number in ending}
        try:
            return child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
