"""`cdc spark`: run apply, replay, compact or copy on a Spark cluster, or print the files that submit such a job.

The arguments of replay and compact are those of `cdc replay` and `cdc log compact`. This module parses them with the
options of those commands, and passes them to the job unchanged. Only a cluster can run copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand
from typer.main import get_command

from cdc import DEFAULT_CONFIG
from cdc.cli import log_storage, replay
from cdc.cli.options import ConfigOption
from cdc.command_output import echo_source
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from cdc.cluster.spark_submit_command import SparkJob, SparkSubmit
    from cdc.config import Definition

SinkOption = Annotated[list[str] | None, typer.Option("--sink", help="Apply only this sink; may be repeated.")]
TriggerOption = Annotated[
    str | None,
    typer.Option(
        "--trigger",
        metavar="5s|once",
        help="Start a batch at this interval; 'once' applies the changes that the log has now, then exits "
        "[default: spark.trigger].",
    ),
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="Run the job on this schedule: a cron expression for Kubernetes, a Quartz cron expression for "
        "Databricks. The verb 'apply' also needs '--trigger once'.",
    ),
]
MasterOption = Annotated[
    str | None, typer.Option("--master", help="Use this Spark master instead of spark.master of the definition.")
]
PythonOption = Annotated[
    str | None,
    typer.Option(
        "--python",
        help="Run the executors with the Python at this path [default: the path of the Python that runs this command].",
    ),
]
ImageOption = Annotated[
    str,
    typer.Option("--image", help="Use this container image, which must contain Spark, Java, cdc and /opt/cdc/job.py."),
]
ExecutorsOption = Annotated[int, typer.Option("--executors", min=1, help="Start this many executors.")]
ClaimOption = Annotated[
    list[str] | None,
    typer.Option(
        "--claim",
        metavar="NAME=PATH",
        help="Mount the persistent volume claim NAME at PATH in all pods; may be repeated.",
    ),
]

EnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME",
        help="Set this environment variable in the job; its value is in the job's secret; may be repeated.",
    ),
]
WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="VERB",
        help="Run this verb instead of apply: replay SINK or compact, with the options of `cdc replay` "
        "and `cdc log compact`; or copy, whose executors read large tables for the reader until no copy is pending; "
        "'--connections N' limits their tasks.",
        show_default=False,
    ),
]


class VerbCommand(TyperCommand):
    """A command that passes unknown options to its verb (apply, replay, compact or copy).

    It passes arguments after `--` to spark-submit.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments before `--`, and store the arguments after `--` in the context."""
        cut = args.index("--") if "--" in args else len(args)
        own, for_submit = args[:cut], args[cut + 1 :]
        # without a verb a misspelt option is an error, as in every command
        ctx.ignore_unknown_options = any(word in VERBS for word in own)
        super().parse_args(ctx, own)
        if for_submit and not ctx.allow_extra_args:
            ctx.fail(f"this command takes no arguments after --: {' '.join(for_submit)}")
        ctx.args = for_submit
        return for_submit


def register(app: typer.Typer) -> None:
    """Add the command group `spark` to the app."""
    group = typer.Typer(
        no_args_is_help=True, help="Run apply, replay, compact or copy on a Spark cluster.", rich_markup_mode=None
    )
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
    """Run apply or the given verb with spark-submit; arguments after -- are options of spark-submit.

    The driver sends the code of cdc to the executors. The executors need Python and the packages that cdc depends on.

    Each run of the tests applies a log by this command on Spark standalone with two workers. Slow tests also run
    replay, compact and copy. YARN, Kubernetes and Databricks were not run.
    """
    import os

    launcher = _launcher(python)
    command = launcher.command(_job(config, verb_arguments, sink, trigger), master, context.args)
    # replaces this process, so that a signal to it reaches the job
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
    """Print the command that `cdc spark submit` runs with the same options, quoted for a shell.

    Each run of the tests runs such a command for apply on Spark standalone with two workers. YARN, Kubernetes and
    Databricks were not run.
    """
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
    """Print a manifest for the Spark operator of Kubernetes; apply it with kubectl apply -f -.

    The pods read secrets from a Secret named cdc-PIPELINE; it has one key per variable or file that the definition
    refers to.

    Tests compare the manifest with the expected text. YARN, Kubernetes and Databricks were not run.
    """
    from cdc.cluster.manifests import PodSettings, kubernetes_manifest

    claims = dict(_parse_claim(text) for text in claim or ())
    pods = PodSettings(image=image, executors=executors, claims=claims, schedule=schedule)
    job = replace(_job(config, verb_arguments, sink, trigger, schedule), extra_variables=tuple(env or ()))
    _print(kubernetes_manifest(job, pods))


def databricks(  # noqa: PLR0913, PLR0917 - one parameter per option
    verb_arguments: WordsArgument = None,
    config: ConfigOption = DEFAULT_CONFIG,
    sink: SinkOption = None,
    trigger: TriggerOption = None,
    workers: ExecutorsOption = 2,
    env: EnvOption = None,
    schedule: ScheduleOption = None,
) -> None:
    """Print databricks.yml, the file of an asset bundle.

    Put this file into a folder that contains the definition, and the built wheel of cdc in its subfolder dist/.

    The job reads secrets from a scope named cdc-PIPELINE; it has one secret per variable that the definition refers
    to. Log and lake must be in an object store.

    Tests compare the bundle with the expected text. YARN, Kubernetes and Databricks were not run.
    """
    from cdc.cluster.manifests import databricks_bundle

    job = replace(_job(config, verb_arguments, sink, trigger, schedule), extra_variables=tuple(env or ()))
    _print([databricks_bundle(job, workers=workers, schedule=schedule)])


def _job(
    config: Path,
    verb_arguments: list[str] | None,
    sinks: list[str] | None,
    trigger: str | None,
    schedule: str | None = None,
) -> SparkJob:
    from cdc.cluster.spark_submit_command import SparkAction, SparkJob, checked_trigger, chosen_sinks
    from cdc.config import check_definition, load_definition

    definition = load_definition(config)
    verb, *arguments = verb_arguments or ["apply"]
    options = parse_verb(verb, arguments, definition)
    if verb != "apply" and (sinks or trigger):
        raise ConfigError(
            f"--sink and --trigger are options of apply, not of {verb}", remedy="leave out --sink and --trigger"
        )
    chosen_sinks(definition, sinks or ())
    job = SparkJob(
        definition=definition,
        written=check_definition(config).written,
        config=config,
        sinks=(options["sink"],) if verb == "replay" else tuple(sinks or ()),
        action=SparkAction(verb),
        action_arguments=tuple(arguments),
        into=options.get("into"),
        trigger=checked_trigger(trigger),
    )
    if schedule is not None and not job.is_bounded:
        raise ConfigError(
            "--schedule needs '--trigger once', because a scheduled run must end", remedy="add '--trigger once'"
        )
    return job


def _launcher(python: str | None) -> SparkSubmit:
    import sys

    from cdc.cluster.spark_submit_command import SparkSubmit

    return SparkSubmit(
        home=_folder_of("pyspark"),
        main=_folder_of("pipelines") / "submitted" / "job.py",
        python=sys.executable,
        executor_python=python or sys.executable,
    )


def _folder_of(package: str) -> Path:
    """Return the directory of an installed package without importing the package."""
    from importlib.util import find_spec

    found = find_spec(package)
    if found is None or found.origin is None:
        raise ConfigError(f"package {package!r} is not installed", remedy="install cdc with its dependencies")
    return Path(found.origin).parent


def _parse_claim(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path.startswith("/"):
        raise ConfigError(f"--claim {text!r} is malformed: expected NAME=/PATH")
    return name, path


def _print(documents: list[dict[str, Any]]) -> None:
    import sys

    from ruamel.yaml import YAML
    from ruamel.yaml.scalarstring import walk_tree

    walk_tree(documents)  # multi-line text as a block
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 1000
    yaml.dump_all(documents, sys.stdout)


def parse_verb(verb: str, arguments: Sequence[str], definition: Definition) -> dict[str, Any]:
    """Parse the arguments of a verb (apply, replay, compact or copy); return parameter name → value.

    Raises ConfigError or a usage error of typer if the verb's command does not accept the arguments.
    """
    from cdc.cluster.spark_submit_command import chosen_sinks
    from cdc.verify_and_replay_options import parse_point_in_time

    if verb not in VERBS:
        raise ConfigError(
            f"unknown verb {verb!r}: expected one of {', '.join(VERBS)}",
            remedy="choose one of these verbs; put options of spark-submit after --",
        )
    app = typer.Typer(add_completion=False)
    app.command(verb)(VERBS[verb])
    options: dict[str, Any] = get_command(app).make_context(verb, list(arguments)).params
    if verb == "replay":
        chosen_sinks(definition, [options["sink"]])
        for option, text, every in (("--from", options["start"], "beginning"), ("--to", options["end"], "latest")):
            if text != every:
                parse_point_in_time(text, option)
    return options


def _apply() -> None:
    """Command for the verb `apply`, which has no arguments; `cdc spark` uses it if no verb is given."""


def _copy(
    connections: Annotated[int | None, typer.Option("--connections", min=1)] = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Command for the verb `copy`, which only a cluster runs."""


VERBS: Final[dict[str, Callable[..., None]]] = {
    "apply": _apply,
    "replay": replay.replay,
    "compact": log_storage.compact,
    "copy": _copy,
}
