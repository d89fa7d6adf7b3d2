"""Contract of a kind of sink for the apply process and for replays: how its sinks are built, staged and checked.

A kind of sink implements `SinkKind` in the module `kind` of its package, and `pipelines.sink_kinds` names this module.
The methods get the definition of the sink at each call, because a process has several sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

from cdc.config.sink_definition import SinkDefinition
from cdc.config.sink_rules import KeyConflict
from cdc.table import TableSchema
from cdc.targets.published_record import Published, TableRecord
from pipelines.sinks.contract import Sink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SessionProvider = Callable[[], "SparkSession"]
"""Function that starts the Spark session, or waits for it, and returns it."""


class StagedTarget(Protocol):
    """New targets of a sink, until `put` replaces the old ones or `discard` is called."""

    @property
    def sink(self) -> Sink:
        """The sink that fills the new targets."""

    @property
    def erased(self) -> Mapping[str, int]:
        """Target → number of files that `put` removed because they contained values that the sink's rules now hide."""

    def forget_earlier(self, schemas: dict[int, TableSchema]) -> None:
        """Remove the staged targets of earlier processes that ended before they called `put`."""

    def open_published(self, log_id: str) -> Published | None:
        """Return the published record of the sink; None if nothing was published.

        If an apply process also publishes after this call, only one of the two succeeds: either its publish fails, or
        `put` of this replay raises SinkFenced.
        """

    def put(self, built: Published, rest: dict[int, TableRecord]) -> Published:
        """Replace the old targets of the tables in `built`; publish and return a record of these tables and `rest`.

        rest: relation → record of the tables whose targets are not replaced.
        """

    def discard(self) -> None:
        """Close the staged sink without replacing the old targets."""


Definition_contra = TypeVar("Definition_contra", bound=SinkDefinition, contravariant=True)


class SinkKind(Protocol[Definition_contra]):
    """How the targets of one kind of sink are written."""

    @property
    def replayed_rows_per_second(self) -> int:
        """Rows of the log that a replay applies per second, for the estimates of a dry run.

        Measured on two cores, with tables of ten columns.
        """

    @property
    def replaces_all_targets(self) -> bool:
        """Whether a replay of all tables replaces also the targets of tables that it could not build."""

    def build(self, sink: Definition_contra, index_folder: str | None = None) -> Sink:
        """Build the sink that a definition describes.

        index_folder: local directory for the key indexes of the targets; None: a temporary directory.
        """

    def build_at(self, sink: Definition_contra, path: str) -> Sink:
        """Build the sink so that it writes all of its tables below a directory; path: absolute, or a URI.

        Raises ConfigError if the targets are in no directory.
        """

    def stage(self, sink: Definition_contra) -> StagedTarget:
        """Return the staged targets of a sink, before anything is written to them."""

    def executors_can_write(self, sink: Definition_contra, has_delta: Callable[[], bool]) -> bool:
        """Return whether executors can write the targets in a replay.

        has_delta: starts the Spark session, and returns whether it supports Delta.
        """

    def sharing(
        self, sink: Definition_contra, built: Iterable[TableRecord], before: Mapping[int, TableRecord]
    ) -> dict[int, TableRecord]:
        """Return the records of the tables in `before` that share a target with a built table, but were not built."""

    def rule_refusals(
        self, sink: Definition_contra, schema: TableSchema, session: SessionProvider
    ) -> Iterator[KeyConflict]:
        """Yield the settings of a table's rule that only Spark can check and that the sink could not apply.

        session: called only if a rule has an expression.
        """

    def load_kernels(self) -> None:
        """Load or compile the functions that a new target needs, so that the first batch does not wait for them."""
