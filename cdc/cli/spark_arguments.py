"""Words of `cdc spark` that say what the cluster runs: apply (the default), replay, or compact.

They are the words of `cdc replay` and `cdc log compact`. This module parses them with the options of those commands and
passes them on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand
from typer.main import get_command

from cdc.cli import replay, retention
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from cdc.config import Definition

WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="VERB",
        help="Verb to run: replay SINK or compact, with the options of `cdc replay` and `cdc log "
        "compact` [default: apply].",
        show_default=False,
    ),
]


class VerbCommand(TyperCommand):
    """A command that leaves unknown options to its verb, and what follows `--` to spark-submit."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep what follows -- as the context's own."""
        cut = args.index("--") if "--" in args else len(args)
        own, handed_on = args[:cut], args[cut + 1 :]
        # without a verb a misspelt option is an error, as in every command
        ctx.ignore_unknown_options = any(word in VERBS for word in own)
        super().parse_args(ctx, own)
        if handed_on and not ctx.allow_extra_args:
            ctx.fail(f"this command takes no arguments after --: {' '.join(handed_on)}")
        ctx.args = handed_on
        return handed_on


def parse_verb(verb: str, arguments: Sequence[str], definition: Definition) -> dict[str, Any]:
    """Parse the arguments of a verb; returns the values by parameter of its command.

    Raises ConfigError, or the usage error of the verb's command, for whatever that command would refuse before it opens
    the log.
    """
    from cdc.cluster.spark_job import chosen_sinks
    from cdc.point_in_time import parse_point_in_time

    if verb not in VERBS:
        raise ConfigError(
            f"no verb is called {verb!r}: expected one of {', '.join(VERBS)}",
            remedy="put options of cdc anywhere and options of spark-submit after --",
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
    """`cdc spark` without a verb: it takes no arguments."""


VERBS: Final[dict[str, Callable[..., None]]] = {
    "apply": _apply,
    "replay": replay.replay,
    "compact": retention.compact,
}
