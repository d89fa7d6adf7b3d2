"""Create the table `verified`: one row for each comparison of a key range of a target with the source."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TEXT, BIG, MOMENT = sa.Text(), sa.BigInteger(), sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "verified",
        sa.Column("pipeline", TEXT, nullable=False),
        sa.Column("sink", TEXT, nullable=False),
        sa.Column("topic", TEXT, nullable=False),
        sa.Column("began", MOMENT, nullable=False),
        sa.Column("number", BIG, nullable=False, autoincrement=False),
        sa.Column("first", TEXT, nullable=True),
        sa.Column("ended", TEXT, nullable=True),
        sa.Column("rows", BIG, nullable=False),
        sa.Column("mismatched", BIG, nullable=False),
        sa.Column("position", BIG, nullable=False),
        sa.Column("verified_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("pipeline", "sink", "topic", "began", "number", name="pk_verified"),
    )


def downgrade() -> None:
    op.drop_table("verified")
