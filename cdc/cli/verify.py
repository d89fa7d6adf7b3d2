"""`cdc verify`: every row and column of every sink against its source, while the workload runs."""

from __future__ import annotations

from typing import Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, ConfigOption, JsonOption

TablesArgument = Annotated[list[str] | None, typer.Argument(metavar="[TABLE]...", help="Globs over schema.table.")]
SinksOption = Annotated[list[str] | None, typer.Option("--sink", help="Only this sink; may be repeated.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=1, help="Seconds until the sinks stand at the cut.")]
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
    timeout: TimeoutOption = 60.0,
    repair: RepairOption = False,
    json: JsonOption = False,
) -> None:
    """Compare every sink with the source at one instant; exit status 4 when a row or a column differs.

    With --repair the running reader reads what differs again, for the sink that has it wrong alone: rows that are
    missing or wrong come, rows that the source does not have go. The exit status is that of the last comparison.
    """
    import subprocess
    import sys

    options = [f"--sink={name}" for name in sink or ()]
    options += [f"--timeout={timeout}", *(["--repair"] if repair else []), *(["--json"] if json else [])]
    options += ["--", *(tables or ())]
    command = [sys.executable, "-m", "pipelines", "verify", "-c", str(config), *options]
    # a child of its own: this package knows nothing of targets' types, and never will of Spark
    raise typer.Exit(subprocess.run(command, check=False).returncode)
