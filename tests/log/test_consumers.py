"""Consumers: their last word counts, survives everybody, and can be taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.errors import LogCorrupt
from cdc.log.consumers import FOLDER, Consumer, forget, list_consumers, register
from cdc.position import Position


def consumer(uuid: str = "1-a", position: int = 5, pinned: int | None = None, seen_at: int = 0) -> Consumer:
    return Consumer(uuid, "lake", Position(position), pinned, seen_at)


def test_nobody_reads_a_new_log(tmp_path: Path):
    assert list_consumers(tmp_path) == []


def test_the_last_word_of_each_counts(tmp_path: Path):
    for word in (consumer(), consumer("2"), consumer(position=9, pinned=3, seen_at=17)):
        register(tmp_path, word)
    assert list_consumers(tmp_path) == [consumer(position=9, pinned=3, seen_at=17), consumer("2")]


def test_positions_of_every_epoch_are_kept(tmp_path: Path):
    register(tmp_path, consumer(position=(2 << 52) + 7))
    assert list_consumers(tmp_path)[0].position.epoch == 2


def test_a_consumer_is_forgotten_once(tmp_path: Path):
    register(tmp_path, consumer())
    assert forget(tmp_path, "1-a")
    assert not forget(tmp_path, "1-a")
    assert list_consumers(tmp_path) == []


@pytest.mark.parametrize("uuid", ["", "../x", "a/b", ".", "a.b", "x" * 65, "a\n"])
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, uuid: str):
    with pytest.raises(ValueError, match="letters, digits and hyphens"):
        consumer(uuid)
    assert not forget(tmp_path, uuid)


@pytest.mark.parametrize("content", ["", "{}", '{"name": 1, "position": "x", "pinned": null, "seen_at": 0}', "[]"])
def test_a_word_that_cannot_be_read_is_an_error_and_not_silence(tmp_path: Path, content: str):
    register(tmp_path, consumer())
    (tmp_path / FOLDER / "1-a.json").write_text(content)
    with pytest.raises(LogCorrupt, match=r"'1-a\.json'"):
        list_consumers(tmp_path)


def test_what_a_killed_process_left_half_written_is_nobody(tmp_path: Path):
    register(tmp_path, consumer())
    (tmp_path / FOLDER / ".2.json.0.tmp").write_text("{")
    assert len(list_consumers(tmp_path)) == 1
