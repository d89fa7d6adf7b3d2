"""The chunk plan of a whole table by blocks, and what is left of it after a restart: cdc/snapshot/chunk_plan.py."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from random import Random

import pytest

from cdc.log_row import LOG_SCHEMA
from cdc.postgres.chunk_queries import BlockRange, StoredTable
from cdc.postgres.tables import TableName
from cdc.snapshot.backfill_documents import TableBackfillState
from cdc.snapshot.chunk_plan import BlockPlan, ChunkLimits, ChunkRange, ChunkResult
from cdc.snapshot.chunk_rows import ChunkRows

LIMITS = ChunkLimits(rows=60, nbytes=1 << 20)
LEAVES = [StoredTable(number, TableName("shop", f"leaf{number}"), 7, 90 + number) for number in (1, 2)]
NOTHING = ChunkRows(LOG_SCHEMA.empty_table(), 0, 0)


def blocks_of(part: ChunkRange) -> list[tuple[int, int, tuple[int, int] | None]]:
    assert isinstance(part.rows, BlockRange)
    return [(part.rows.leaf.oid, block, part.rows.lines) for block in range(part.rows.first, part.rows.end)]


def told_again(done: TableBackfillState) -> TableBackfillState:
    """As the catalog keeps it."""
    return TableBackfillState.from_json(json.loads(json.dumps(asdict(done))))


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_that_goes_on_reads_what_was_not_durable_and_nothing_else(seed: int) -> None:
    random, done, durable = Random(seed), TableBackfillState(), Counter[tuple[int, int]]()
    for _ in range(4):
        plan, taken = BlockPlan(done, LEAVES, LIMITS), list[ChunkRange]()
        for _ in range(random.randrange(60)):
            if random.random() < 0.6 and (part := plan.next_range()) is not None:
                plan.record_read(ChunkResult(part, random.randrange(200), 8_000, None, is_idle=False))
                taken.append(part)
            elif taken:
                part = taken.pop(random.randrange(len(taken)))
                plan.mark_durable(ChunkResult.of(part, NOTHING))
                durable.update((oid, block) for oid, block, _ in blocks_of(part))
        done = told_again(done)
        assert done.share == pytest.approx(durable.total() / sum(leaf.blocks for leaf in LEAVES))

    plan = BlockPlan(done, LEAVES, LIMITS)
    while (part := plan.next_range()) is not None:
        durable.update((oid, block) for oid, block, _ in blocks_of(part))

    assert durable == Counter({(leaf.oid, block): 1 for leaf in LEAVES for block in range(leaf.blocks)})


def test_a_block_in_pieces_is_left_until_all_of_them_are_durable() -> None:
    leaf, done = replace(LEAVES[0], blocks=1), TableBackfillState()
    plan = BlockPlan(done, [leaf], LIMITS)
    whole = plan.next_range()
    assert whole is not None
    plan.split(whole)
    pieces = [part for _ in range(100) if (part := plan.next_range()) is not None]

    for piece in pieces[1:]:
        plan.mark_durable(ChunkResult.of(piece, NOTHING))
    left = BlockPlan(told_again(done), [leaf], LIMITS).next_range()
    plan.mark_durable(ChunkResult.of(pieces[0], NOTHING))

    assert left is not None
    assert blocks_of(left) == [(leaf.oid, 0, None)]
    assert BlockPlan(told_again(done), [leaf], LIMITS).next_range() is None


def test_a_leaf_that_was_rewritten_is_begun_anew() -> None:
    done = TableBackfillState()
    plan = BlockPlan(done, LEAVES, LIMITS)
    while (part := plan.next_range()) is not None:
        plan.mark_durable(ChunkResult.of(part, NOTHING))

    again = BlockPlan(told_again(done), [LEAVES[0], replace(LEAVES[1], file=8)], LIMITS).next_range()

    assert again is not None
    assert blocks_of(again)[0] == (2, 0, None)
