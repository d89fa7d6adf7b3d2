"""Verb: what a cluster is to do, as words of `cdc spark`: none is apply, or `replay SINK --into PATH`, `compact --all`.

They are those of `cdc replay` and `cdc log compact`, checked by what reads them there, and handed on as written.
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
        help="replay SINK or compact, with options of `cdc replay` and `cdc log compact` [default: apply].",
        show_default=False,
    ),
]


class WithVerb(TyperCommand):
    """A command of which what it does not know belongs to a verb among its words, and what follows -- to neither."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep what follows -- as the context's own."""
        cut = args.index("--") if "--" in args else len(args)
        own, handed_on = args[:cut], args[cut + 1 :]
        # without a verb a slip of the pen is told as everywhere
        ctx.ignore_unknown_options = any(word in VERBS for word in own)
        super().parse_args(ctx, own)
        if handed_on and not ctx.allow_extra_args:
            ctx.fail(f"nothing is handed on from behind --: {' '.join(handed_on)}")
        ctx.args = handed_on
        return handed_on


def options_of(verb: str, words: Sequence[str], definition: Definition) -> dict[str, Any]:
    """What the words of a verb say, by parameter of its command.

    Raises ConfigError, or what a misused command raises, for what the verb would refuse before it has looked at a log.
    """
    from cdc.cluster.job import chosen_sinks
    from cdc.point_in_time import parse_moment

    if verb not in VERBS:
        raise ConfigError(
            f"no verb is called {verb!r}: expected one of {', '.join(VERBS)}",
            remedy="options of ours come anywhere, of spark-submit behind --",
        )
    app = typer.Typer(add_completion=False)
    app.command(verb)(VERBS[verb])
    said: dict[str, Any] = get_command(app).make_context(verb, list(words)).params
    if verb == "replay":
        chosen_sinks(definition, [said["sink"]])
        for option, text, every in (("--from", said["start"], "beginning"), ("--to", said["end"], "latest")):
            if text != every:
                parse_moment(text, option)
    return said


def _apply() -> None:
    """Nothing beside it."""


VERBS: Final[dict[str, Callable[..., None]]] = {
    "apply": _apply,
    "replay": replay.replay,
    "compact": retention.compact,
}
