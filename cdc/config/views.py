"""Models of the views of a definition: streams that SQL derives from the captured tables."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, TypeVar

from pydantic import AfterValidator, BaseModel, Field

from cdc.config.field_types import Identifier, Model, Name, invalid
from cdc.config.units import Seconds
from cdc.table import split_topic

NAME_OF_VIEWS: Final = "views"
"""Name under which the state of the views is reported, as that of a sink is under its name."""


def _topic(text: str) -> str:
    schema, name = split_topic(text)
    if not schema or not name:
        raise invalid("expected schema.table, for example shop.order_documents")
    return text


class Incremental(StrEnum):
    """Whether a view has to be computed from the changes of its tables."""

    #: From the changes if the SQL allows it; otherwise the whole view is computed at intervals.
    AUTO = "auto"
    #: From the changes; SQL that does not allow it is an error.
    REQUIRED = "required"


class Refresh(Model):
    """When a view is computed as a whole, if it cannot be computed from the changes of its tables."""

    every: Annotated[Seconds, Field(gt=0)] = 600.0
    """Minimum time between two computations; default 10 minutes."""


class ViewOptions(Model):
    """Name of a view, and how it is computed."""

    name: Annotated[str, AfterValidator(_topic)]
    """Topic of the view, `schema.table`; no captured table may have the same."""
    over: Name | None = None
    """Delta sink whose targets the SELECT reads; default the first one. All views of a pipeline read the same sink."""
    incremental: Incremental = Incremental.AUTO
    """`auto` computes a view as a whole, every `refresh.every`, if its SQL does not allow more; `required` refuses such
    SQL."""
    refresh: Refresh = Refresh()
    keep: Annotated[Seconds, Field(gt=0)] | None = None
    """Time for which rows are kept; older ones are deleted in steps of a tenth of it, of one day at most. The age of a
    row is the commit time of the last change of the tables minus the one date or timestamp of the row's key. Default:
    all rows are kept."""


class View(ViewOptions):
    """A view: the rows of a SELECT over captured tables and other views, as a topic in the log of views."""

    key: Annotated[tuple[Identifier, ...], Field(min_length=1)]
    """Columns of the result that identify a row."""
    sql: Annotated[str, Field(min_length=1)]
    """SELECT in the dialect of Spark. Tables are named by their topics, `schema.table`, and have the columns of the
    sink's targets."""


_Consumer = TypeVar("_Consumer", bound=BaseModel)


def with_views(consumer: _Consumer, *, may_have_both: bool = False) -> _Consumer:
    """Return a sink or a delivery with the globs of its views in place of those of `tables`, if it has views.

    may_have_both: whether it may have views besides its tables; its globs are then left as they are.
    """
    views = getattr(consumer, "views", ())
    if not views:
        return consumer
    if "tables" in consumer.model_fields_set and getattr(consumer, "tables", ()) != views:
        if may_have_both:
            return consumer
        raise invalid("'tables' and 'views' exclude each other: tables and views need two deliveries")
    return consumer.model_copy(update={"tables": views})
