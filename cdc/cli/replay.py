"""`cdc replay`: rebuild a sink's target from the change log alone."""

from __future__ import annotations

from typing import Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption

SinkArgument = Annotated[str, typer.Argument(help="Rebuild this sink of the definition.")]
FromOption = Annotated[str, typer.Option("--from", help="Begin at this position or ISO 8601 time, or at 'beginning'.")]
ToOption = Annotated[
    str, typer.Option("--to", help="End at this position (included) or ISO 8601 time, or at 'latest'.")
]
TablesOption = Annotated[
    list[str] | None, typer.Option("--tables", help="Rebuild only tables that match this glob; may be repeated.")
]
IntoOption = Annotated[
    str | None,
    typer.Option("--into", metavar="PATH", help="Build the new target at this path, and do not change the old target."),
]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the rows, bytes and time that the replay would need, and change nothing."),
]


def register(app: typer.Typer) -> None:
    """Add the command `replay` to the app."""
    app.command()(replay)


def replay(  # noqa: PLR0913, PLR0917 - one parameter per option
    sink: SinkArgument,
    config: ConfigOption = DEFAULT_CONFIG,
    start: FromOption = "beginning",
    end: ToOption = "latest",
    tables: TablesOption = None,
    into: IntoOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Rebuild a sink's target from the log alone.

    The command does not read the source. The new target replaces the old target in one step. A running apply process
    pauses the sink for this step and continues with the new target. A table that cannot be rebuilt keeps its old
    target, and the command exits with status 1.
    """
    import subprocess
    import sys

    options = [f"--from={start}", f"--to={end}", *(f"--tables={glob}" for glob in tables or ())]
    options += [*([f"--into={into}"] if into is not None else []), *(["--dry-run"] if dry_run else [])]
    options += ["--json"] if json else []
    command = [sys.executable, "-m", "pipelines", "replay", "-c", str(config), *options, "--", sink]
    # a child process: this package imports neither Spark nor the code of targets
    raise typer.Exit(subprocess.run(command, check=False).returncode)
