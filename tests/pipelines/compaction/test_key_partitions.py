"""The division of rows by key: parts of moved keys, base rows in older runs, and rows as Arrow IPC streams."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.compaction.compaction_steps import compact
from pipelines.compaction.key_partitions import (
    from_ipc,
    moves_as_texts,
    part_of_key,
    parts_of_moved_keys,
    read_base_rows,
    read_partial_moves,
    split_by_part,
    to_ipc,
)
from tests.pipelines.cold_log import append, log_writer
from tests.pipelines.compaction.test_compaction_steps import compacted_state, key
from tests.pipelines.fold_model import log_row, to_arrow


def move(position: int, old: str, new: str) -> dict[str, object]:
    """A partial image of a row whose key changed."""
    return key(position, 1, "u", new, after={1: new}, partial=True, old_key=[old])


def test_keys_that_moves_connect_are_in_one_part() -> None:
    moves = moves_as_texts(to_arrow([move(5, "a", "b"), move(6, "b", "c"), move(7, "x", "y")]))
    for parts in (1, 2, 5, 64):
        part_of = parts_of_moved_keys(moves, parts)
        assert set(part_of) == {(1, name) for name in "abcxy"}
        assert part_of[1, "a"] == part_of[1, "b"] == part_of[1, "c"] == part_of_key(1, "a", parts)
        assert part_of[1, "x"] == part_of[1, "y"] == part_of_key(1, "x", parts)


def test_the_part_of_a_key_depends_on_its_relation() -> None:
    assert {part_of_key(relation, "1", 1_000) for relation in range(20)} > {part_of_key(1, "1", 1_000)}


def test_moves_of_files_are_those_with_partial_images_in_the_range(tmp_path: Path) -> None:
    writer = log_writer(tmp_path)
    append(writer, [[key(5, 0, "c", "a", after={1: "a"})]])
    append(writer, [[key(6, 0, "d", "a"), move(6, "a", "b")]])
    append(writer, [[key(7, 0, "d", "b"), key(7, 1, "u", "c", after={1: "c"}, old_key=["b"])]])
    files = LogReader(tmp_path).every_file()

    found = read_partial_moves(files, Position(0), Position(7)).to_pylist()
    assert found == [{"relation": 1, "key": "b", "old_key": "a"}]
    assert read_partial_moves(files, Position(6), Position(7)).num_rows == 0


def test_base_rows_are_those_of_old_keys_and_the_truncates_of_their_relation(tmp_path: Path) -> None:
    writer = log_writer(tmp_path)
    other = log_row(2, (5, 3), "c", key=["a"], after={1: "a"})
    append(writer, [[log_row(1, (5, 0), "t"), key(5, 1, "c", "a"), key(5, 2, "c", "b"), other]])
    compact(None, tmp_path, everything=True)

    runs = compacted_state(tmp_path).runs
    found = read_base_rows(moves_as_texts(to_arrow([move(6, "a", "c")])), runs)
    assert sorted(zip(found["op"].to_pylist(), found["key"].to_pylist(), strict=True)) == [("c", ["a"]), ("t", None)]
    assert read_base_rows(moves_as_texts(to_arrow([])), runs).num_rows == 0


@pytest.mark.parametrize("parts", [3, 5])
def test_every_row_is_in_the_part_that_it_belongs_to(parts: int) -> None:
    split = {part: numbers.to_pylist() for part, numbers in split_by_part(np.array([2, 0, 2, 0]), parts)}

    assert split == {0: [1, 3], 2: [0, 2]} | {part: [] for part in range(parts) if part not in (0, 2)}


def test_rows_survive_their_ipc_stream() -> None:
    rows = pa.table({"id": [1, None], "text": ["a", ""]})

    assert from_ipc(to_ipc(rows)) == rows
    assert from_ipc(pa.py_buffer(to_ipc(rows.slice(2)))) == rows.slice(2)
