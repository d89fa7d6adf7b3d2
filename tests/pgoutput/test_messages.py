"""Relations that a message needs before its rows can be decoded."""

from __future__ import annotations

import pytest

from cdc.lsn import Lsn
from cdc.pgoutput.messages import (
    AnyMessage,
    BeginMessage,
    Delete,
    Insert,
    OldKind,
    OldTuple,
    Relation,
    Truncate,
    Update,
    row_oids,
)


@pytest.mark.parametrize(
    ("message", "oids"),
    [
        (Insert(7, ("1",)), (7,)),
        (Update(7, None, ("1",)), (7,)),
        (Delete(7, OldTuple(OldKind.KEY, ("1",))), (7,)),
        (Truncate((7, 8), cascade=False, restart_identity=False), (7, 8)),
        (Relation(7, "shop", "t", "d", ()), ()),
        (BeginMessage(Lsn(1), 0, 1), ()),
    ],
)
def test_rows_and_truncates_need_their_relations(message: AnyMessage, oids: tuple[int, ...]) -> None:
    assert row_oids(message) == oids
