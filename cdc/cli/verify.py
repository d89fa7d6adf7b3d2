"""`cdc verify`: every row and column of every sink against its source, while the workload runs, or against the log."""

from __future__ import annotations

from typing import Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.errors import ConfigError

TablesArgument = Annotated[list[str] | None, typer.Argument(metavar="[TABLE]...", help="Globs over schema.table.")]
SinksOption = Annotated[list[str] | None, typer.Option("--sink", help="Only this sink; may be repeated.")]
ModeOption = Annotated[
    str,
    typer.Option(
        "--mode",
        metavar="rows|checksum|count",
        help="rows names what differs; checksum takes no row from the source; count counts.",
    ),
]
AgainstOption = Annotated[
    str,
    typer.Option("--against", metavar="source|log", help="By the log, neither the source nor 'cdc run' is asked."),
]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=1, help="Seconds until the sinks stand at the cut.")]
EveryOption = Annotated[
    str | None, typer.Option("--every", metavar="TIME", help="Go on, by ranges of keys: a pass every 30m, 1h, …")
]
RateOption = Annotated[
    int | None, typer.Option("--rate", metavar="ROWS", help="With --every: rows of the source per second at most.")
]
RepairOption = Annotated[
    bool, typer.Option("--repair", help="Have the rows that differ read again, by key, then compare again.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
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
    """Compare every sink with the source at one instant; exit status 4 when a row or a column differs.

    With --repair the running reader reads what differs again, for the sink that has it wrong alone: rows that are
    missing or wrong come, rows that the source does not have go. The exit status is that of the last comparison.
    With --every it goes on until SIGTERM, and one that starts again goes on where the last one stopped; 'cdc status'
    shows through when each table is verified.
    """
    import sys

    from cdc.config.verify_options import Against, VerifyMode

    _check_choice("--mode", mode, [one.value for one in VerifyMode])
    _check_choice("--against", against, [one.value for one in Against])
    options = [f"--sink={name}" for name in sink or ()]
    options += [f"--mode={mode}", f"--against={against}", f"--timeout={timeout}"]
    options += [*([f"--every={every}"] if every is not None else []), *([f"--rate={rate}"] if rate is not None else [])]
    options += [*(["--repair"] if repair else []), *(["--json"] if json else []), "--", *(tables or ())]
    command = [sys.executable, "-m", "pipelines", "verify", "-c", str(config), *options]
    # a child of its own: this package knows nothing of targets' types, and never will of Spark
    raise typer.Exit(_run_child(command))


def _check_choice(option: str, word: str, known: list[str]) -> None:
    """Here, where a person is told as of any other option: the child knows none of this command's."""
    if word not in known:
        expected = ", ".join(map(repr, known))
        raise ConfigError(
            f"invalid value for '{option}': {word!r} is not one of {expected}", remedy="run 'cdc verify --help'"
        )


def _run_child(command: list[str]) -> int:
    """Run a child, which gets the signals that would end this process; its exit status."""
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
