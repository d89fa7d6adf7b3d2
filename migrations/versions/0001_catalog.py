"""Create the first eight tables of the catalog, without foreign keys."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Written out, and not taken from the models: a revision must stay the same when the models change.
TEXT, BIG, JSON, MOMENT = sa.Text(), sa.BigInteger(), sa.JSON(), sa.DateTime(timezone=True)
IDENTITY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

TABLES = ("pipelines", "processes", "sinks", "tables", "dead_letters", "commands", "audit", "leases")


def _key(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=f"pk_{table}")


def _needed(**types: sa.types.TypeEngine[Any]) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name, kind in types.items()]


def _optional(**types: sa.types.TypeEngine[Any]) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=True) for name, kind in types.items()]


def upgrade() -> None:
    op.create_table("pipelines", *_needed(name=TEXT, definition=TEXT, updated_at=MOMENT), _key("pipelines", "name"))
    op.create_table(
        "processes",
        *_needed(pipeline=TEXT, process=TEXT, pid=BIG, state=TEXT),
        *_optional(error=JSON),
        *_needed(figures=JSON, reported_at=MOMENT),
        _key("processes", "pipeline", "process"),
    )
    op.create_table(
        "sinks",
        *_needed(pipeline=TEXT, sink=TEXT, position=BIG),
        *_optional(committed_at=MOMENT),
        *_needed(lag_seconds=sa.Double(), state=TEXT),
        *_optional(reason=TEXT),
        *_needed(recorded_at=MOMENT),
        _key("sinks", "pipeline", "sink"),
    )
    op.create_table(
        "tables",
        *_needed(pipeline=TEXT, sink=TEXT, topic=TEXT, state=TEXT),
        *_optional(reason=TEXT),
        *_needed(position=BIG),
        *_optional(version=BIG),
        *_needed(rows=BIG, recorded_at=MOMENT),
        _key("tables", "pipeline", "sink", "topic"),
    )
    _requests()


def _requests() -> None:
    op.create_table(
        "dead_letters",
        *_needed(pipeline=TEXT, sink=TEXT, position=BIG, ordinal=BIG, topic=TEXT),
        *_needed(key=JSON, code=TEXT, message=TEXT, added_at=MOMENT),
        _key("dead_letters", "pipeline", "sink", "position", "ordinal"),
    )
    op.create_table(
        "commands",
        *_needed(id=IDENTITY, pipeline=TEXT, kind=TEXT, payload=JSON, state=TEXT),
        *_optional(result=JSON),
        *_needed(posted_at=MOMENT),
        *_optional(finished_at=MOMENT),
        _key("commands", "id"),
    )
    op.create_index("ix_commands_pending", "commands", ["pipeline", "kind", "state"])
    op.create_table(
        "audit",
        *_needed(id=IDENTITY, actor=TEXT, action=TEXT, subject=TEXT, detail=JSON, written_at=MOMENT),
        _key("audit", "id"),
    )
    op.create_table("leases", *_needed(name=TEXT, holder=TEXT, expires_at=MOMENT), _key("leases", "name"))


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)
