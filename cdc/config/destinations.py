"""Models of the destinations of deliveries: the keys that only one type of delivery has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdc.config.deliveries import DeliverySettings
from cdc.config.field_types import Location, Switch, Whole
from cdc.config.units import Bytes


class FileDelivery(DeliverySettings):
    """A delivery that appends events to files, one JSON object per line."""

    type: Literal["file"]
    path: Location
    """Directory of the files."""
    rotate: Bytes = 128 * 2**20
    """Size above which a new file begins."""
    fsync: Switch = True
    """Whether a batch is on the disk before its progress is recorded."""


class StdoutDelivery(DeliverySettings):
    """A delivery that prints events, one JSON object per line; `cdc deliver NAME` runs it, `cdc run` does not."""

    type: Literal["stdout"]


class SocketDelivery(DeliverySettings):
    """A delivery that writes events to a TCP connection, one JSON object per line."""

    type: Literal["tcp"]
    host: Annotated[str, Field(min_length=1)]
    """Host name or address of the receiver."""
    port: Annotated[Whole, Field(ge=1, le=65535)]
    """Port of the receiver."""
    acknowledge: Switch = False
    """Whether the receiver answers each line with a line that begins with the id of the event; otherwise an event
    counts as delivered when the operating system has taken it."""


Delivery = Annotated[
    FileDelivery
    | SocketDelivery
    | StdoutDelivery,
    Field(discriminator="type"),
]  # fmt: skip
"""A delivery of a definition; `type` selects the destination."""
