"""`cdc replay`: a sink's target built anew from the change log alone."""

from __future__ import annotations

from typing import Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption

SinkArgument = Annotated[str, typer.Argument(help="As the definition names it.")]
FromOption = Annotated[str, typer.Option("--from", help="A position, an ISO 8601 time, or beginning.")]
ToOption = Annotated[str, typer.Option("--to", help="A position (included), an ISO 8601 time, or latest.")]
TablesOption = Annotated[list[str] | None, typer.Option("--tables", help="Only these, a glob; may be repeated.")]
IntoOption = Annotated[
    str | None, typer.Option("--into", metavar="PATH", help="Keep the new target there, leave the old one alone.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print rows, bytes and expected time; do nothing.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
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
    """Build a sink's target anew from the log, without the source, and put it in place in one step.

    A running apply process lets go of the sink for the switch and goes on from the new target. A table that
    could not be built stays as it was, and the exit status is 1.
    """
    import subprocess
    import sys

    options = [f"--from={start}", f"--to={end}", *(f"--tables={glob}" for glob in tables or ())]
    options += [*([f"--into={into}"] if into is not None else []), *(["--dry-run"] if dry_run else [])]
    options += ["--json"] if json else []
    command = [sys.executable, "-m", "pipelines", "replay", "-c", str(config), *options, "--", sink]
    # a child of its own: this package knows nothing of targets' types, and never will of Spark
    raise typer.Exit(subprocess.run(command, check=False).returncode)
