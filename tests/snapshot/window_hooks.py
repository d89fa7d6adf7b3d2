"""Moments of a chunk: what a test does in its window, before the snapshot and between that and the watermark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import LiteralString

from cdc.postgres.connection import connect
from cdc.snapshot.watermark_window import Chunk, WatermarkWindows
from cdc.table import TableSchema


def nothing() -> None:
    """No hook."""


@dataclass
class Script:
    """Statements that are run one at a time, by whoever comes next."""

    dsn: str
    statements: Sequence[LiteralString]
    done: int = 0
    _lock: Lock = field(default_factory=Lock)

    def __call__(self) -> None:
        """Run the next one, if there is one left."""
        with self._lock:
            if self.done < len(self.statements):
                self.done += 1
                with connect(self.dsn, application_name="cdc test") as conn:
                    conn.execute(self.statements[self.done - 1])


class Moments(WatermarkWindows):
    """A meeting place that lets a test act in every window; the threads that copy carry it out."""

    def __init__(
        self, *, opened: Callable[[], object] = nothing, in_hand: Callable[[Chunk], object] = lambda _: None
    ) -> None:
        """opened: what came up to R is received, and no snapshot taken; in_hand: the rows are read, H is not sent."""
        super().__init__()
        self._opened, self._in_hand = opened, in_hand

    def open_window(
        self, token: str, relation: int, patience: float, *, keyless: bool = False, outlives_copies: bool = False
    ) -> TableSchema | None:
        """See Placing."""
        schema = super().open_window(token, relation, patience, keyless=keyless, outlives_copies=outlives_copies)
        self._opened()
        return schema

    def set_chunk(self, token: str, chunk: Chunk) -> None:
        """See Placing."""
        self._in_hand(chunk)
        super().set_chunk(token, chunk)
