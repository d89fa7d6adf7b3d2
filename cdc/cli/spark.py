"""`cdc spark`: what a Spark cluster does for a pipeline, as a command that is run or as text for who runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption
from cdc.cli.spark_arguments import VerbCommand, WordsArgument, parse_verb
from cdc.errors import ConfigError
from cdc.terminal_output import echo_source

if TYPE_CHECKING:
    from cdc.cluster.job import SparkJob
    from cdc.cluster.submit import SparkSubmit

SinkOption = Annotated[list[str] | None, typer.Option("--sink", help="Only this sink; may be repeated.")]
TriggerOption = Annotated[
    str | None,
    typer.Option("--trigger", metavar="5s|once", help="Time between batches; once: apply what there is, and end."),
]
ScheduleOption = Annotated[str | None, typer.Option("--schedule", help="When a run that ends is started.")]
MasterOption = Annotated[str | None, typer.Option("--master", help="Instead of spark.master of the definition.")]
PythonOption = Annotated[str | None, typer.Option("--python", help="Of the executors [default: as it is here].")]
ImageOption = Annotated[str, typer.Option("--image", help="With Spark, Java, cdc, and /opt/cdc/job.py.")]
ExecutorsOption = Annotated[int, typer.Option("--executors", min=1, help="How many.")]
ClaimOption = Annotated[
    list[str] | None,
    typer.Option("--claim", metavar="NAME=PATH", help="A volume claim that all pods mount there; may be repeated."),
]

EnvOption = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME", help="A variable from the secrets, as AWS_…; may be repeated."),
]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(no_args_is_help=True, help="Apply, replay, compact on a Spark cluster.", rich_markup_mode=None)
    group.command(cls=VerbCommand, context_settings={"allow_extra_args": True})(submit)
    group.command("print", cls=VerbCommand, context_settings={"allow_extra_args": True})(print_)
    group.command(cls=VerbCommand)(k8s)
    group.command(cls=VerbCommand)(databricks)
    app.add_typer(group, name="spark")


def submit(  # noqa: PLR0913, PLR0917 - one parameter per option
    context: typer.Context,
    verb_arguments: WordsArgument = None,
    config: ConfigOption = DEFAULT_CONFIG,
    master: MasterOption = None,
    sink: SinkOption = None,
    trigger: TriggerOption = None,
    python: PythonOption = None,
) -> None:
    """Run the apply process, or what the verb_arguments say, by spark-submit; what follows -- is handed on to it.

    The driver sends its own code to the executors; Python and what cdc depends on have to be there.
    """
    import os

    launcher = _launcher(python)
    command = launcher.command(_job(config, verb_arguments, sink, trigger), master, context.args)
    # in this process' place: whoever stops it stops the job
    os.execve(command[0], command, {**os.environ, **launcher.environment})  # noqa: S606 - no shell is wanted


def print_(  # noqa: PLR0913, PLR0917 - one parameter per option
    context: typer.Context,
    verb_arguments: WordsArgument = None,
    config: ConfigOption = DEFAULT_CONFIG,
    master: MasterOption = None,
    sink: SinkOption = None,
    trigger: TriggerOption = None,
    python: PythonOption = None,
) -> None:
    """Print the command that submit would run, as a shell takes it; the options are the same."""
    launcher = _launcher(python)
    echo_source(launcher.line(launcher.command(_job(config, verb_arguments, sink, trigger), master, context.args)))


def k8s(  # noqa: PLR0913, PLR0917 - one parameter per option
    verb_arguments: WordsArgument = None,
    config: ConfigOption = DEFAULT_CONFIG,
    image: ImageOption = "cdc:latest",
    sink: SinkOption = None,
    trigger: TriggerOption = None,
    executors: ExecutorsOption = 2,
    claim: ClaimOption = None,
    env: EnvOption = None,
    schedule: ScheduleOption = None,
) -> None:
    """Print the manifest for the Spark operator of Kubernetes, for kubectl apply -f -.

    Secrets come from a Secret named cdc-PIPELINE: one key per variable or file that the definition refers to.
    """
    from cdc.cluster.kubernetes import PodSettings, manifest

    claims = dict(_parse_claim(text) for text in claim or ())
    pods = PodSettings(image=image, executors=executors, claims=claims, schedule=schedule)
    _print(manifest(replace(_job(config, verb_arguments, sink, trigger, schedule), more=tuple(env or ())), pods))


def databricks(  # noqa: PLR0913, PLR0917 - one parameter per option
    verb_arguments: WordsArgument = None,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: SinkOption = None,
    trigger: TriggerOption = None,
    workers: ExecutorsOption = 2,
    env: EnvOption = None,
    schedule: ScheduleOption = None,
) -> None:
    """Print databricks.yml, an asset bundle, for a folder with the definition and dist/ with the built wheel.

    Secrets come from a scope named cdc-PIPELINE: one per variable that the definition refers to.
    """
    from cdc.cluster.databricks import bundle

    job = replace(_job(config, verb_arguments, sink, trigger, schedule), more=tuple(env or ()))
    _print([bundle(job, workers=workers, schedule=schedule)])


def _job(
    config: Path,
    verb_arguments: list[str] | None,
    sinks: list[str] | None,
    trigger: str | None,
    schedule: str | None = None,
) -> SparkJob:
    from cdc.cluster.job import SparkAction, SparkJob, checked_trigger, chosen_sinks
    from cdc.config import check_definition, load_definition

    definition = load_definition(config)
    verb, *arguments = verb_arguments or ["apply"]
    options = parse_verb(verb, arguments, definition)
    if verb != "apply" and (sinks or trigger):
        raise ConfigError("--sink and --trigger belong to apply", remedy=f"leave them out: {verb} takes neither")
    chosen_sinks(definition, sinks or ())
    job = SparkJob(
        definition=definition,
        written=check_definition(config).written,
        config=config,
        sinks=(options["sink"],) if verb == "replay" else tuple(sinks or ()),
        verb=SparkAction(verb),
        words=tuple(arguments),
        into=options.get("into"),
        trigger=checked_trigger(trigger),
    )
    if schedule is not None and not job.once:
        raise ConfigError("a run that is started by a schedule has to end", remedy="add --trigger once")
    return job


def _launcher(python: str | None) -> SparkSubmit:
    import sys

    from cdc.cluster.submit import SparkSubmit

    return SparkSubmit(
        home=_folder_of("pyspark"),
        main=_folder_of("pipelines") / "submitted" / "job.py",
        python=sys.executable,
        executor_python=python or sys.executable,
    )


def _folder_of(package: str) -> Path:
    """Where a package that is not imported here is installed."""
    from importlib.util import find_spec

    found = find_spec(package)
    if found is None or found.origin is None:
        raise ConfigError(f"package {package!r} is not installed", remedy="install cdc with all that it depends on")
    return Path(found.origin).parent


def _parse_claim(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path.startswith("/"):
        raise ConfigError(f"--claim {text!r}: expected NAME=/PATH")
    return name, path


def _print(documents: list[dict[str, Any]]) -> None:
    import sys

    from ruamel.yaml import YAML
    from ruamel.yaml.scalarstring import walk_tree

    walk_tree(documents)  # text of several lines as such
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 1000
    yaml.dump_all(documents, sys.stdout)
