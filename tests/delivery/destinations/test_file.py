"""The file destination: what was not committed is never in the files, and a full disk or damage is a clear error."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cdc.config.destinations import FileDelivery
from cdc.delivery.destinations.contract import DeliveryIdentity, Event
from cdc.delivery.destinations.file import LOCK, PROGRESS, FileDestination
from cdc.errors import DeliveryFenced, DestinationFull, DestinationUnavailable, ProgressDamaged, ProgressLost


def destination(folder: Path, **fields: Any) -> FileDestination:
    """A destination in a folder."""
    settings = FileDelivery.model_validate({"type": "file", "name": "copy", "path": str(folder), **fields})
    return FileDestination(settings, DeliveryIdentity("shop", "copy", "LOG"))


def event(number: int, value: bytes = b"{}") -> Event:
    """An event."""
    return Event(f"LOG/0/1/{number}", 1, number, "t", None, value)


def numbers(folder: Path) -> list[int]:
    """Ordinals of the events in the files."""
    lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [int(json.loads(line)["id"].rpartition("/")[2]) for line in lines]


def test_only_committed_events_are_there_after_the_next_open(tmp_path: Path):
    first = destination(tmp_path)
    assert first.open() is None
    first.send([event(1), event(2)])
    first.commit(b"one")
    first.send([event(3)])
    first.close()

    second = destination(tmp_path)
    assert second.open() == b"one"
    second.send([event(4)])
    second.commit(b"two")
    second.close()

    assert numbers(tmp_path) == [1, 2, 4]


def test_a_large_file_is_followed_by_a_new_one(tmp_path: Path):
    send_four(tmp_path, first=0)
    again = destination(tmp_path, rotate="1KiB")

    assert again.open() == b"3"
    again.close()
    assert sorted(contents(tmp_path)) == [f"copy-00000{n}.jsonl" for n in (1, 2, 3)]
    assert numbers(tmp_path) == [0, 1, 2, 3]


def send_four(folder: Path, first: int) -> None:
    """Four commits of one event; two events fill a file."""
    files = destination(folder, rotate="1KiB")
    files.open()
    for number in range(first, first + 4):
        files.send([event(number, b"x" * 600)])
        files.commit(b"%d" % number)
    files.close()


def contents(folder: Path) -> dict[str, bytes]:
    """Name and content of each file with events."""
    return {file.name: file.read_bytes() for file in folder.glob("*.jsonl")}


def remove_progress(folder: Path) -> None:
    (folder / PROGRESS).unlink()


def remove_progress_and_lock(folder: Path) -> None:
    (folder / PROGRESS).unlink()
    (folder / LOCK).unlink()


def remove_lock(folder: Path) -> None:
    (folder / LOCK).unlink()


def take_files_away(folder: Path) -> None:
    for file in folder.glob("*.jsonl"):
        file.unlink()


def keep_all(_folder: Path) -> None:
    pass


@pytest.mark.parametrize("more", [0, 1, 4])
@pytest.mark.parametrize("consumer", [keep_all, take_files_away])
@pytest.mark.parametrize("lose", [remove_progress, remove_progress_and_lock, remove_lock, keep_all])
def test_files_are_never_touched_if_their_progress_is_lost_or_an_older_one(
    tmp_path: Path, lose: Callable[[Path], None], consumer: Callable[[Path], None], more: int
):
    send_four(tmp_path, first=0)
    older = (tmp_path / PROGRESS).read_bytes()
    for number in range(more):
        send_four(tmp_path, first=4 * (number + 1))
    (tmp_path / PROGRESS).write_bytes(older)
    lose(tmp_path)
    consumer(tmp_path)
    before = contents(tmp_path)
    files = destination(tmp_path, rotate="1KiB")
    is_proved = (lose is keep_all and not more) or (lose is remove_lock and not (more and before))
    is_unknown = lose is remove_progress_and_lock and not before

    if is_proved or is_unknown:
        assert files.open() == (None if is_unknown else b"3")
    else:
        with pytest.raises(ProgressLost):
            files.check(())
        with pytest.raises(ProgressLost):
            files.open()
        assert contents(tmp_path) == before
        files.close()
        with pytest.raises(ProgressLost):
            files.open()
    files.send([event(99)])
    files.commit(b"again")
    files.close()

    after = contents(tmp_path)
    assert {name: after[name][: len(content)] for name, content in before.items()} == before
    assert files.open() == b"again"
    files.close()


def test_the_tail_of_a_killed_process_is_no_older_progress(tmp_path: Path):
    for number in range(3):
        files = destination(tmp_path)
        files.open()
        files.send([event(2 * number)])
        files.commit(b"%d" % number)
        files.send([event(2 * number + 1)])
        files.close()

    files.check(())
    assert files.open() == b"2"
    files.close()
    assert numbers(tmp_path) == [0, 2, 4]


def test_a_record_of_an_earlier_version_is_continued(tmp_path: Path):
    line = b'{"id": "LOG/0/1/7"}\n'
    (tmp_path / "copy-000001.jsonl").write_bytes(line + b"not committed")
    (tmp_path / PROGRESS).write_text(f'{{"file": 1, "length": {len(line)}, "progress": "b25l"}}')
    files = destination(tmp_path)

    assert files.open() == b"one"
    files.close()
    assert numbers(tmp_path) == [7]


def test_the_directory_of_another_delivery_is_refused(tmp_path: Path):
    send_four(tmp_path, first=0)
    settings = FileDelivery.model_validate({"type": "file", "name": "other", "path": str(tmp_path)})
    other = FileDestination(settings, DeliveryIdentity("shop", "other", "LOG"))

    for opens in (other.open, lambda: other.check(())):
        with pytest.raises(DestinationUnavailable, match="has the progress of delivery 'copy'"):
            opens()
        other.close()
    assert numbers(tmp_path) == [0, 1, 2, 3]


def test_a_second_process_is_refused(tmp_path: Path):
    first, second = destination(tmp_path), destination(tmp_path)
    first.open()

    with pytest.raises(DeliveryFenced, match="another process writes"):
        second.open()
    second.close()
    first.close()
    second.open()
    second.close()


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process can be longer."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_retried_and_leaves_nothing_behind(tmp_path: Path):
    files = destination(tmp_path)
    files.open()
    files.send([event(1)])
    files.commit(b"one")
    with full_disk(5_000):
        with pytest.raises(DestinationFull):
            files.send([event(2), event(3, b"x" * 10_000)])
        files.close()

    files.open()
    files.send([event(2)])
    files.commit(b"two")
    files.close()

    assert numbers(tmp_path) == [1, 2]


def test_a_disk_that_is_full_when_the_progress_is_stored_keeps_the_old_progress(tmp_path: Path):
    files = destination(tmp_path)
    files.open()
    files.send([event(1)])
    with full_disk(500), pytest.raises(DestinationFull):
        files.commit(b"x" * 1_000)
    files.close()

    assert files.open() is None
    files.close()
    assert numbers(tmp_path) == []


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"file": 1, "length": 0, "progress": "?"}', '{"file": 1'])
def test_damaged_progress_is_named(tmp_path: Path, content: str):
    (tmp_path / PROGRESS).write_text(content)
    files = destination(tmp_path)

    with pytest.raises(ProgressDamaged, match=r"progress\.json"):
        files.open()
    files.close()


def test_a_file_that_is_shorter_than_its_record_is_damage(tmp_path: Path):
    files = destination(tmp_path)
    files.open()
    files.send([event(1)])
    files.commit(b"one")
    files.close()
    (tmp_path / "copy-000001.jsonl").write_text("")

    with pytest.raises(ProgressDamaged, match=r"is shorter than 'progress\.json'"):
        files.open()
    files.close()


def test_a_folder_that_cannot_be_written_is_unavailable(tmp_path: Path):
    (tmp_path / "file").touch()

    with pytest.raises(DestinationUnavailable, match="cannot write to"):
        destination(tmp_path / "file" / "sub").open()


def test_a_file_url_is_a_path(tmp_path: Path):
    files = destination(tmp_path, path=f"file://{tmp_path}")
    files.open()
    files.close()

    assert (tmp_path / "copy-000001.jsonl").exists()
