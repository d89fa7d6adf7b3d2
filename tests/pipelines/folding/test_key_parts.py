"""The division of rows by key: parts of moved keys, and rows as Arrow IPC streams."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from pipelines.folding.key_parts import (
    from_ipc,
    moves_as_texts,
    part_of_key,
    parts_of_moved_keys,
    split_by_part,
    to_ipc,
)
from tests.pipelines.fold_model import Row, log_row, to_arrow


def move(position: int, old: str, new: str) -> Row:
    """A partial image of a row whose key changed."""
    return log_row(1, (position, 1), "u", key=[new], after={1: new}, partial=True, old_key=[old])


def test_keys_that_moves_connect_are_in_one_part() -> None:
    moves = moves_as_texts(to_arrow([move(5, "a", "b"), move(6, "b", "c"), move(7, "x", "y")]))
    for parts in (1, 2, 5, 64):
        part_of = parts_of_moved_keys(moves, parts)
        assert set(part_of) == {(1, name) for name in "abcxy"}
        assert part_of[1, "a"] == part_of[1, "b"] == part_of[1, "c"] == part_of_key(1, "a", parts)
        assert part_of[1, "x"] == part_of[1, "y"] == part_of_key(1, "x", parts)


def test_the_part_of_a_key_depends_on_its_relation() -> None:
    assert {part_of_key(relation, "1", 1_000) for relation in range(20)} > {part_of_key(1, "1", 1_000)}


@pytest.mark.parametrize("parts", [3, 5])
def test_every_row_is_in_the_part_that_it_belongs_to(parts: int) -> None:
    split = {part: numbers.to_pylist() for part, numbers in split_by_part(np.array([2, 0, 2, 0]), parts)}

    assert split == {0: [1, 3], 2: [0, 2]} | {part: [] for part in range(parts) if part not in (0, 2)}


def test_rows_survive_their_ipc_stream() -> None:
    rows = pa.table({"id": [1, None], "text": ["a", ""]})

    assert from_ipc(to_ipc(rows)) == rows
    assert from_ipc(pa.py_buffer(to_ipc(rows.slice(2)))) == rows.slice(2)
