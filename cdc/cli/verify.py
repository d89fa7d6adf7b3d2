"""`cdc verify`: every row and column of every sink against its source, while the workload runs."""

from __future__ import annotations

from typing import Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, ConfigOption, JsonOption

TablesArgument = Annotated[list[str] | None, typer.Argument(metavar="[TABLE]...", help="Globs over schema.table.")]
SinksOption = Annotated[list[str] | None, typer.Option("--sink", help="Only this sink; may be repeated.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=1, help="Seconds until the sinks stand at the cut.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(verify)


def verify(
    tables: TablesArgument = None,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: SinksOption = None,
    timeout: TimeoutOption = 60.0,
    json: JsonOption = False,
) -> None:
    """Compare every sink with the source at one instant; exit status 4 when a row or a column differs."""
    import subprocess
    import sys

    options = [f"--sink={name}" for name in sink or ()]
    options += [f"--timeout={timeout}", *(["--json"] if json else []), "--", *(tables or ())]
    command = [sys.executable, "-m", "pipelines", "verify", "-c", str(config), *options]
    # a child of its own: this package knows nothing of targets' types, and never will of Spark
    raise typer.Exit(subprocess.run(command, check=False).returncode)
