"""Progress: its content, the file next to the log, and the generation that fences an earlier process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.bucket_files import Root, as_root
from cdc.delivery.progress import FOLDER, ParkedKey, Progress, ProgressFile, delivery_uuid, order_key
from cdc.errors import DeliveryFenced, DeliveryOfAnotherLog, EventRefused, ProgressDamaged
from cdc.position import ChangePosition, Position
from tests.fixtures.s3 import S3

INITIAL = Progress(log_id="LOG", position=Position(10))
_POSITIONS = st.integers(0, 2**62).map(Position)


def parked(position: int, key: str | None = "1", topic: str = "t") -> ParkedKey:
    """A dead letter."""
    return ParkedKey(
        first=ChangePosition(Position(position), 3), relation=1, table="shop.orders", topic=topic, key=(key,)
    )


@given(
    position=_POSITIONS,
    bootstrap=st.none() | _POSITIONS,
    keys=st.lists(st.tuples(st.integers(1, 2**62), st.none() | st.text(max_size=5), st.text(max_size=5)), max_size=5),
    dropped=st.integers(0, 10**12),
)
def test_progress_is_read_as_it_was_written(
    position: Position, bootstrap: Position | None, keys: list[Any], dropped: int
):
    progress = Progress(log_id="LOG", position=position, bootstrap=bootstrap, dropped=dropped, generation=3)
    for first, key, topic in keys:
        progress = progress.parking(parked(first, key, topic), EventRefused("because"))

    assert Progress.from_json(progress.to_json()) == progress


@given(content=st.binary(max_size=40) | st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(
        st.sampled_from(["format", "log_id", "position", "parked", "bootstrap", "dropped", "generation"]), inner
    ), max_leaves=8,
).map(lambda found: json.dumps(found).encode()))  # fmt: skip
def test_any_other_content_is_damage(content: bytes):
    with pytest.raises(ProgressDamaged, match="somewhere"):
        Progress.parse(content, "somewhere")


def test_a_newer_format_is_refused():
    content = json.loads(INITIAL.to_json()) | {"format": 2}

    with pytest.raises(ProgressDamaged):
        Progress.parse(json.dumps(content).encode(), "somewhere")


def test_a_parked_key_keeps_its_first_refused_event_and_what_it_needs_is_kept():
    progress = INITIAL.parking(parked(5), EventRefused("a")).parking(parked(7), EventRefused("b"))

    (key,) = progress.parked.values()
    assert (key.first.position, key.message, key.code) == (5, "a", "CDC-7006")
    assert progress.needed == 4
    assert progress.without(key.identity) == INITIAL
    assert INITIAL.needed == 10


def test_keys_of_different_topics_tables_and_null_are_different():
    identities = {order_key("t", key) for key in ((), (None,), ("",), ("null",), ("a", "b"), ("a,b",))}

    assert len(identities | {order_key("u", ("",))}) == 7


def test_progress_of_another_log_is_refused():
    INITIAL.check_log("LOG", "copy")
    with pytest.raises(DeliveryOfAnotherLog, match="'copy'"):
        INITIAL.check_log("OTHER", "copy")


def test_a_process_that_opens_the_file_continues_and_fences_the_one_before(tmp_path: Path):
    check_fencing(as_root(tmp_path))


def test_a_process_that_opens_the_file_in_a_bucket_continues_and_fences_the_one_before(s3: S3):
    check_fencing(s3.root())


def check_fencing(root: Root) -> None:
    """Two processes after each other, while the first one still runs."""
    first, second = (ProgressFile(root, "LOG", "copy") for _ in range(2))
    assert first.read() is None
    assert first.open(INITIAL) == Progress(log_id="LOG", position=Position(10), generation=1)
    first.write(Progress(log_id="LOG", position=Position(20)))

    assert second.open(INITIAL).position == 20
    with pytest.raises(DeliveryFenced, match="'copy'"):
        first.write(Progress(log_id="LOG", position=Position(30)))
    second.write(Progress(log_id="LOG", position=Position(40)))

    found = second.read()
    assert found is not None
    assert (found.position, found.generation) == (40, 2)


def test_each_delivery_and_each_log_has_a_file_of_its_own(tmp_path: Path):
    for log_id, name in (("LOG", "a"), ("LOG", "b"), ("OTHER", "a")):
        ProgressFile(tmp_path, log_id, name).open(Progress(log_id=log_id))

    files = {file.name for file in (tmp_path / FOLDER).iterdir()}
    assert files == {f"{delivery_uuid(*one)}.json" for one in (("LOG", "a"), ("LOG", "b"), ("OTHER", "a"))}


def test_a_damaged_file_is_named(tmp_path: Path):
    file = ProgressFile(tmp_path, "LOG", "a")
    file.open(INITIAL)
    path = tmp_path / FOLDER / f"{delivery_uuid('LOG', 'a')}.json"
    path.write_bytes(path.read_bytes()[:30])

    with pytest.raises(ProgressDamaged, match=path.name):
        file.open(INITIAL)


def test_a_progress_that_replaces_a_damaged_one_fences_the_process_before(tmp_path: Path):
    first, second = (ProgressFile(tmp_path, "LOG", "a") for _ in range(2))
    first.open(INITIAL)
    (tmp_path / FOLDER / f"{delivery_uuid('LOG', 'a')}.json").write_text("?")

    second.begin_again(INITIAL)

    second.write(INITIAL)
    with pytest.raises(DeliveryFenced):
        first.write(INITIAL)


def test_a_file_that_was_removed_fences(tmp_path: Path):
    file = ProgressFile(tmp_path, "LOG", "a")
    file.open(INITIAL)
    (tmp_path / FOLDER / f"{delivery_uuid('LOG', 'a')}.json").unlink()

    with pytest.raises(DeliveryFenced):
        file.write(INITIAL)
