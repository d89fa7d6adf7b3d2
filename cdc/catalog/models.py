"""SQLAlchemy models of the catalog: requests to processes, and the state that the page shows.

Nothing here is the only copy of a position or of data: those are read from the log and from the sinks.
So rows name pipelines by text, without foreign keys: visible state may arrive before its definition.
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
    """A moment; SQLite keeps no zone, so UTC is put in and taken out here."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - SQLAlchemy's signature
        """To UTC; a moment without zone is refused, it could be any."""
        if value is not None and value.tzinfo is None:
            raise ValueError("expected a datetime with a time zone")
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - as above
        """With its zone."""
        if value is None:
            return None
        moment: datetime = value
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


BigIdentity: Final = BigInteger().with_variant(Integer, "sqlite")
"""SQLite counts up only a primary key of type INTEGER, which has 64 bits there."""


class CatalogModel(DeclarativeBase):
    """The root of the catalog's tables."""

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
    """A definition as it was last applied."""

    __tablename__ = "pipelines"
    name: Mapped[str] = mapped_column(primary_key=True)
    definition: Mapped[str]
    updated_at: Mapped[datetime]


class ProcessRow(CatalogModel):
    """What a process last said of itself."""

    __tablename__ = "processes"
    pipeline: Mapped[str] = mapped_column(primary_key=True)
    process: Mapped[str] = mapped_column(primary_key=True)
    pid: Mapped[int]
    state: Mapped[str]
    error: Mapped[dict[str, Any] | None]
    figures: Mapped[list[Any]]
    reported_at: Mapped[datetime]


class SinkRow(CatalogModel):
    """Where a sink stood when it last said so."""

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
    """Where a table stood in a sink, or at the source (sink '')."""

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
    """A change that a sink set aside: the mirror of what stands beside the sink."""

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
    """One range of keys of a table that was compared with the source in one pass over the table."""

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
    """Something a person asked of a running process."""

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
    """Who did what to what; rows are only added."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(BigIdentity, primary_key=True)
    actor: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]
    detail: Mapped[dict[str, Any]]
    written_at: Mapped[datetime]


class LeaseRow(CatalogModel):
    """Who may do a thing that only one may do, and until when."""

    __tablename__ = "leases"
    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str]
    expires_at: Mapped[datetime]
