"""SQLAlchemy models of the catalog: requests to processes, and the state that the page shows.

The catalog never contains the only copy of a position or of data: those are in the log and in the sinks.
Rows contain the name of their pipeline without a foreign key, because a report may arrive before the definition.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Double, Index, Integer, MetaData, Text, TypeDecorator
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING: Final = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcDateTime(TypeDecorator[datetime]):
    """Column type for a time with zone; values are stored in UTC, because SQLite stores no zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - SQLAlchemy's signature
        """Convert a value to UTC for the database; raises ValueError for a time without zone."""
        if value is not None and value.tzinfo is None:
            raise ValueError("the datetime has no time zone: expected one with a time zone")
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - as above
        """Convert a value of the database to a time with zone UTC."""
        if value is None:
            return None
        time: datetime = value
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


BigIdentity: Final = BigInteger().with_variant(Integer, "sqlite")
"""Type of generated numbers; SQLite generates them only for a key of type INTEGER, which has 64 bits there."""


class CatalogModel(DeclarativeBase):
    """Base class of all models."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads this name from the class
        str: Text(),
        int: BigInteger(),
        float: Double(),
        datetime: UtcDateTime(),
        dict[str, Any]: JSON(),
        list[Any]: JSON(),
    }


class PipelineRow(CatalogModel):
    """The last applied definition of a pipeline."""

    __tablename__ = "pipelines"
    name: Mapped[str] = mapped_column(primary_key=True)
    definition: Mapped[str]
    updated_at: Mapped[datetime]


class ProcessRow(CatalogModel):
    """The last report of a process."""

    __tablename__ = "processes"
    pipeline: Mapped[str] = mapped_column(primary_key=True)
    process: Mapped[str] = mapped_column(primary_key=True)
    pid: Mapped[int]
    state: Mapped[str]
    error: Mapped[dict[str, Any] | None]
    figures: Mapped[list[Any]]
    reported_at: Mapped[datetime]


class SinkRow(CatalogModel):
    """The last reported progress of a sink."""

    __tablename__ = "sinks"
    pipeline: Mapped[str] = mapped_column(primary_key=True)
    sink: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int]
    committed_at: Mapped[datetime | None]
    lag_seconds: Mapped[float]
    state: Mapped[str]
    reason: Mapped[str | None]
    recorded_at: Mapped[datetime]


class TableRow(CatalogModel):
    """The last reported progress of a table in a sink, or at the source (sink '')."""

    __tablename__ = "tables"
    pipeline: Mapped[str] = mapped_column(primary_key=True)
    sink: Mapped[str] = mapped_column(primary_key=True)
    topic: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    reason: Mapped[str | None]
    position: Mapped[int]
    version: Mapped[int | None]
    rows: Mapped[int]
    recorded_at: Mapped[datetime]


class DeadLetterRow(CatalogModel):
    """A copy of a dead letter; the original is stored with the sink."""

    __tablename__ = "dead_letters"
    pipeline: Mapped[str] = mapped_column(primary_key=True)
    sink: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    ordinal: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    topic: Mapped[str]
    key: Mapped[list[Any]]
    code: Mapped[str]
    message: Mapped[str]
    added_at: Mapped[datetime]


class VerifiedRow(CatalogModel):
    """The result of comparing one key range of a table with the source, in one pass over the table."""

    __tablename__ = "verified"
    pipeline: Mapped[str] = mapped_column(primary_key=True)
    sink: Mapped[str] = mapped_column(primary_key=True)
    topic: Mapped[str] = mapped_column(primary_key=True)
    began: Mapped[datetime] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    first: Mapped[str | None]
    ended: Mapped[str | None]
    rows: Mapped[int]
    mismatched: Mapped[int]
    position: Mapped[int]
    verified_at: Mapped[datetime]


class CommandRow(CatalogModel):
    """A request of a person to a running process."""

    __tablename__ = "commands"
    __table_args__ = (Index("ix_commands_pending", "pipeline", "kind", "state"),)
    id: Mapped[int] = mapped_column(BigIdentity, primary_key=True)
    pipeline: Mapped[str]
    kind: Mapped[str]
    payload: Mapped[dict[str, Any]]
    state: Mapped[str]
    result: Mapped[dict[str, Any] | None]
    posted_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]


class AuditRow(CatalogModel):
    """An audit entry: an actor's action on a subject; never changed or removed."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(BigIdentity, primary_key=True)
    actor: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]
    detail: Mapped[dict[str, Any]]
    written_at: Mapped[datetime]


class LeaseRow(CatalogModel):
    """The holder of a lease, and when the lease expires."""

    __tablename__ = "leases"
    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str]
    expires_at: Mapped[datetime]
