"""Events of a delivery: reads windows of the log, selects and routes their changes, and encodes them.

The next window is read and encoded in a thread while the loop waits for the destination.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import Definition
from cdc.config.deliveries import DeliverySettings
from cdc.delivery.destinations.contract import ID_HEADER, POSITION_HEADER, XID_HEADER, Event
from cdc.delivery.formats.contract import EncodedEvents, Format, LogicalMessages
from cdc.delivery.log_windows import LogWindow, next_window
from cdc.delivery.progress import ParkedKey, Progress, order_key
from cdc.delivery.table_routes import RoutedRows, TableRoutes
from cdc.errors import CdcError
from cdc.log.file_selection import EVERY_ROW, TableSelection
from cdc.log.reader import LogReader
from cdc.log_row import Operation, message_prefixes
from cdc.position import ChangePosition, Position
from cdc.table import TableSchema

AHEAD: Final = 1
"""Number of windows that are prepared while the loop sends one."""


@dataclass(frozen=True, slots=True)
class EventPart:
    """Events of one part of a window, in log order, and the changes that cannot be encoded."""

    events: list[Event]
    keys: Callable[[int], ParkedKey]
    """Returns the key of an event, given its index, as a dead letter without reason."""
    refused: dict[ParkedKey, CdcError] = field(default_factory=dict)
