"""Work: what was asked to be read again, and how far that has come, as the catalog keeps both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

from cdc.errors import ConfigError
from cdc.table import CAPTURED, TableSchema, TableState, matches

BACKFILL: Final = "backfill"
"""The kind of command that asks for one; its payload is a Request, its result the Work so far."""
KEYS: Final = 10_000
"""Keys of one request: the catalog keeps them, and whoever lists the newest requests reads them all."""


class BackfillAction(StrEnum):
    """What can be said about a backfill; each is a kind of command, as `backfill.pause`."""

    #: Rest after the chunk that is on its way.
    PAUSE = "pause"
    #: Go on.
    RESUME = "resume"
    #: End after the chunk that is on its way; what was placed stays.
    CANCEL = "cancel"

    @property
    def kind(self) -> str:
        """Of the command; its payload names the backfill as `id`."""
        return f"{BACKFILL}.{self.value}"


@dataclass(frozen=True, slots=True)
class BackfillRequest:
    """What was asked for."""

    tables: tuple[str, ...]
    """Globs of topics."""
    where: str | None = None
    first: tuple[str, ...] | None = None
    last: tuple[str, ...] | None = None
    """Keys, as text, both included."""
    sink: str | None = None
    rate: int | None = None
    """Rows per second at most."""
    resync: bool = False
    """The whole table, between a new version of its schema and a `g`."""
    epoch: int | None = None
    """Where nobody asked: of the log, which says that the tables have to be copied."""
    keys: tuple[tuple[str, ...], ...] | None = None
    """Of one table, as text that its columns take: their rows, and for a key without a row that it is gone."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read what to_json wrote."""
        said: dict[str, Any] = dict(fields)
        for name in ("tables", "first", "last"):
            said[name] = tuple(said[name]) if said.get(name) else None
        if said.get("keys") is not None:  # an empty list must not become the whole table
            said["keys"] = tuple(map(tuple, said["keys"]))
        return cls(**said)

    def to_json(self) -> dict[str, Any]:
        """As it is kept in the catalog."""
        return asdict(self)


@dataclass(slots=True)
class Blocks:
    """Of one table, or of one leaf of a partitioned table: some that are not durable in the log yet."""

    oid: int
    file: int
    """`pg_class.relfilenode`: with another one the numbers mean nothing."""
    next: int
    end: int
    """Excluded."""


@dataclass(slots=True)
class TableBackfillState:
    """How far one table has come."""

    state: str = "queued"
    """`queued`, `snapshotting`, or `done`."""
    rows: int = 0
    estimate: int = 0
    """Of all its rows, as the planner thinks."""
    seconds: float = 0.0
    """Of reading so far."""
    after: list[str] | None = None
    """Where it is read by key: the last one that is durable in the log."""
    blocks: list[Blocks] | None = None
    """Where it is read by blocks: what is left."""
    size: int = 0
    """Blocks of the whole."""
    began: int | None = None
    """Where a full copy began."""
    since: int | None = None
    """What the log held when any other reading in parts began."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read what asdict and JSON made of it."""
        blocks = fields.get("blocks")
        return cls(**{**fields, "blocks": None if blocks is None else [Blocks(**part) for part in blocks]})

    @property
    def share(self) -> float | None:
        """How much of it is done, 0–1; None while nobody can say."""
        if self.state == "done":
            return 1.0
        if self.blocks is not None and self.size:
            return 1 - sum(part.end - part.next for part in self.blocks) / self.size
        return self.rows / max(self.estimate, self.rows) if self.rows else None

    @property
    def left(self) -> float | None:
        """Seconds until it is done at the pace so far; None while nobody can say."""
        share = self.share
        return self.seconds * (1 - share) / share if share else None


@dataclass(slots=True)
class BackfillState:
    """How far the whole has come: what the catalog shows, and what a restarted reader goes on from."""

    state: str = "queued"
    """`queued`, `snapshotting`, `paused`, `done`, `cancelled`, or `failed`."""
    tables: dict[str, TableBackfillState] = field(default_factory=dict)
    """By topic."""
    reason: str | None = None
    """Why nothing is read at the moment, where nobody asked for that."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any] | None) -> Self:
        """Read what to_json wrote; None is work that was not begun."""
        said = fields or {}
        tables = {topic: TableBackfillState.from_json(done) for topic, done in said.get("tables", {}).items()}
        return cls(said.get("state", "queued"), tables, said.get("reason"))

    def to_json(self) -> dict[str, Any]:
        """As it is kept in the catalog."""
        return asdict(self)


def check_request(
    request: BackfillRequest, known: Mapping[int, TableSchema], sinks: Mapping[str, Any]
) -> list[TableSchema]:
    """The tables that are meant; raises ConfigError for what cannot be done."""
    if request.sink is not None and request.sink not in sinks:
        listed = ", ".join(map(repr, sinks)) or "none"
        raise ConfigError(f"no sink is called {request.sink!r}", remedy=f"sinks of this pipeline: {listed}")
    live = [s for s in known.values() if s.state is not TableState.DROPPED]
    chosen = [s for s in live if matches(s.topic, request.tables)]
    for glob in request.tables:
        if not any(matches(s.topic, [glob]) for s in chosen):
            listed = ", ".join(sorted(s.topic for s in live)[:10]) or "none"
            raise ConfigError(f"no table of the log matches {glob!r}", remedy=f"tables there: {listed}")
    for schema in chosen:
        if not schema.key and not request.resync:
            raise ConfigError(
                f"{schema.topic!r} has no key, so its rows cannot be read in ranges",
                remedy=f"give it a primary key, or copy all of it: cdc tables resync '{schema.topic}'",
            )
        for key in (request.first, request.last, *(request.keys or ())):
            if key is not None and len(key) != len(schema.key):
                names = ", ".join(column.name for column in schema.key)
                raise ConfigError(
                    f"the key of {schema.topic!r} is ({names}), got {len(key)} values",
                    remedy="separate its values by commas; one that holds a comma stands in double quotes",
                )
        if schema.state not in CAPTURED and not request.resync:
            raise ConfigError(
                f"{schema.topic!r} is {schema.state.value}: {schema.reason}",
                remedy=f"cdc tables resync '{schema.topic}'",
            )
    if request.keys is not None:
        _check_listed(request, request.keys, chosen)
    return chosen


def _check_listed(request: BackfillRequest, keys: tuple[tuple[str, ...], ...], tables: list[TableSchema]) -> None:
    if request.resync or any(said is not None for said in (request.where, request.first, request.last)):
        raise ConfigError("listed keys go with no range, no predicate and no resync", remedy="ask for one of them")
    if len(tables) > 1:
        topics = ", ".join(sorted(schema.topic for schema in tables)[:10])
        raise ConfigError(f"keys are those of one table, and {len(tables)} are named: {topics}", remedy="name one")
    if not keys:
        raise ConfigError("the list of keys is empty", remedy="name at least one, or leave the list out")
    if len(keys) > KEYS:
        raise ConfigError(
            f"{len(keys):,} keys are too many for one request: at most {KEYS:,}",
            remedy="ask one part after the other, or for a range or a predicate",
        )
