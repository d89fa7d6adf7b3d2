"""Renders the page of one pipeline's status as HTML: the whole document once, and its sections after each sample.

Jinja2 renders the files of `templates/` and escapes every value, so no value from the catalog becomes markup. Only the
server renders sections; the browser's script replaces the sections whose HTML changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cdc.errors import COMMAND
from cdc.service import number_format
from cdc.service.page import chart_coordinates, section_values
from cdc.service.status import PipelineStatus

SECTIONS: Final = ("headline", "problems", "totals", "flow", "log", "tables", "backfills", "processes")
"""Ids of the sections that `render` returns; the name of a section's template is its id."""


@dataclass(frozen=True, slots=True)
class PageContext:
    """The values that the page shows in addition to the status; they are constant while the server runs."""

    source: str
    """Host and database of Postgres, without the password."""
    log: str
    """Root path of the log."""
    sink_types: Mapping[str, str]
    """Kind of each sink, by its name: `delta`, or the engine of a search sink."""
    definition: str
    """Path of the definition file in the commands that the page shows."""
    may_change: bool
    """Whether the service accepts requests that change something."""


def page(status: PipelineStatus, context: PageContext, history: Mapping[str, Mapping[str, object]]) -> str:
    """Return the whole HTML document of the page; `history` is the result of RateHistory.to_json()."""
    return _TEMPLATES.get_template("page.html").render(
        title=status.name, state=status.state, is_locked=False, sections=render(status, context, history)
    )


def locked_page() -> str:
    """Return the page without data; its script asks for the token and then loads the sections."""
    empty = dict.fromkeys(SECTIONS, "")
    return _TEMPLATES.get_template("page.html").render(title="cdc", state="locked", is_locked=True, sections=empty)


def docs_page() -> str:
    """Return the HTML document of `/docs`, which shows the description of the API.

    The document's script loads the description, and sends the token if the browser has one.
    """
    return files(__package__).joinpath("static", "docs.html").read_text(encoding="utf-8")


def render(status: PipelineStatus, context: PageContext, history: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Return the inner HTML of each section, by section id; `history` is the result of RateHistory.to_json()."""
    values = {"status": status, "context": context, "rates": history["rates"], "lags": history["lags"]}
    return {name: _section(name, values) for name in SECTIONS}


def _section(name: str, values: Mapping[str, object]) -> Markup:
    # Jinja2 has escaped the values
    return Markup(_TEMPLATES.get_template(f"{name}.html").render(values).strip())  # noqa: S704


def _command_in(remedy: str) -> str:
    """Return the command that a remedy contains; "" if it contains none."""
    command = COMMAND.search(remedy)
    return "" if command is None else command[1]


def _tone(state: str) -> str:
    return section_values.TONES.get(state, "plain")


def _words(state: str) -> str:
    return state.replace("_", " ")


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("cdc.service.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.globals.update(charts=chart_coordinates, views=section_values, UNKNOWN=number_format.UNKNOWN)
    environment.filters.update(
        age=number_format.format_age,
        command_in=_command_in,
        count=number_format.format_count,
        size=number_format.format_size,
        tone=_tone,
        words=_words,
    )
    return environment


_TEMPLATES: Final = _environment()
