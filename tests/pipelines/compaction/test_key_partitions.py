"""Partial images that changed a key, as files of the log have them, and the rows of the old keys in older runs."""

from __future__ import annotations

from pathlib import Path

from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.compaction.compaction_steps import compact
from pipelines.compaction.key_partitions import read_base_rows, read_partial_moves
from pipelines.folding.key_parts import moves_as_texts
from tests.pipelines.cold_log import append, log_writer
from tests.pipelines.compaction.test_compaction_steps import compacted_state, key
from tests.pipelines.fold_model import log_row, to_arrow


def move(position: int, old: str, new: str) -> dict[str, object]:
    """A partial image of a row whose key changed."""
    return key(position, 1, "u", new, after={1: new}, partial=True, old_key=[old])


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
