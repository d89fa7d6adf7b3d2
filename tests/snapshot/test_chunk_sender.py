"""Chunk sender: the schema row that ends a copy, and the error of a copy that cannot end."""

from __future__ import annotations

import pytest

from cdc.errors import ConfigError
from cdc.position import Position
from cdc.snapshot.chunk_sender import end_of_copy_chunk, end_of_first_copy_chunk
from cdc.table import TableState
from tests.log.rows import schema_of


def test_a_copy_whose_table_needs_a_resync_ends_with_the_command_that_asks_for_it() -> None:
    marked = schema_of(7, "note").flagged(TableState.NEEDS_RESYNC, "rows were lost")
    says = r"'shop\.orders' cannot be copied: it became needs_resync: rows were lost"
    with pytest.raises(ConfigError, match=says) as told:
        end_of_copy_chunk(marked, Position(8))
    assert told.value.fix == "copy the table again: cdc tables resync 'shop.orders'"


def test_of_a_table_that_is_gone_it_asks_for_no_copy() -> None:
    with pytest.raises(ConfigError) as told:
        end_of_copy_chunk(schema_of(7).flagged(TableState.DROPPED, "gone"), Position(8))
    assert "resync" not in told.value.fix


@pytest.mark.parametrize("state", [TableState.DROPPED, TableState.NEEDS_RESYNC])
def test_the_end_of_a_first_copy_makes_no_table_live_that_was_marked_after_its_last_row(state: TableState) -> None:
    with pytest.raises(ConfigError, match="it became " + state.value):
        end_of_first_copy_chunk(schema_of(7).flagged(state, "marked"))
    ended = end_of_first_copy_chunk(schema_of(7).flagged(TableState.SNAPSHOTTING, "added")).schema
    assert ended is not None
    assert ended.state is TableState.LIVE
