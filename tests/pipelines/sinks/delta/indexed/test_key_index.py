"""Key index: finds what a dict finds, with merges by its thread, after crashes, with damaged files, without room."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pipelines.sinks.delta.indexed.key_index import (
    ENTRY_BYTES,
    GROWTH,
    MANIFEST,
    PIECE,
    SMALL_FILES,
    KeyHashes,
    KeyIndex,
    KeyRun,
    PreparedRun,
)
from tests.fixtures.disk import small_file_system
from tests.fixtures.examples import examples

Key = tuple[int, int]
"""The two words of a hash."""
ON_DISK = 4
"""Entries from which a run is a file: few, so that the thread merges often."""
TABLE = "table 1"
KEYS: list[Key] = [(high, low) for high in (0, 1, 2, 1 << 63, (1 << 64) - 2, (1 << 64) - 1) for low in (0, 7)]


def hashes(keys: Sequence[Key]) -> KeyHashes:
    """Return hashes with these words."""
    return KeyHashes(*(np.array([key[word] for key in keys], np.uint64) for word in (0, 1)))


def random_keys(count: int, seed: int = 1) -> list[Key]:
    """Return distinct keys whose high words are evenly distributed."""
    words = np.random.default_rng(seed).integers(0, 1 << 64, (count, 2), np.uint64)
    return [(int(high), int(low)) for high, low in words]


def add(index: KeyIndex, path: str, keys: Sequence[Key]) -> None:
    """Add a file whose rows have these keys, in this order."""
    index.add({path: (hashes(keys), np.arange(len(keys)))})


def found_in(index: KeyIndex, keys: Sequence[Key]) -> list[tuple[Key, str, int]]:
    """Return the entries of the files of the index that have one of the keys: key, path and row, sorted."""
    matches, path_of = index.find(hashes(keys)), {number: path for path, number in index.files.items()}
    wanted, files, rows = (values.tolist() for values in matches)
    entries = zip(wanted, files, rows, strict=True)
    return sorted((keys[number], path_of[file], row) for number, file, row in entries if file in path_of)


def run_files(folder: Path) -> list[Path]:
    """Return the files of runs."""
    return sorted(folder.glob("*.run"))


class Modelled:
    """An index, and the entries that it must find."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.copies = folder, 0
        (folder / "0").mkdir()
        self.index = KeyIndex(folder / "0", TABLE, ON_DISK)
        self.files: dict[str, list[Key]] = {}
        """Path → the key of each row."""
        self.added = 0
        self.prepared: list[tuple[dict[int, list[Key]], PreparedRun]] = []
        """Files that another thread has prepared and that are not added yet."""

    def prepare(self, size: int) -> None:
        """Prepare two files in another thread."""
        files = {self.index.new_number(): KEYS[:size], self.index.new_number(): KEYS[size : size + 3]}
        entries = {number: (hashes(keys), np.arange(len(keys))) for number, keys in files.items()}
        with ThreadPoolExecutor(1) as thread:
            self.prepared.append((files, thread.submit(self.index.prepare, entries).result()))

    def add_prepared(self, choice: int) -> None:
        """Add prepared files: both, or only the first one because the other one has left the table."""
        if self.prepared:
            files, prepared = self.prepared.pop(choice % len(self.prepared))
            numbers = {f"file {self.added + place}": number for place, number in enumerate([*files][: 1 + choice % 2])}
            self.added += len(numbers)
            self.files |= {path: files[number] for path, number in numbers.items()}
            self.index.add_prepared(numbers, prepared)

    def save(self, _: int) -> None:
        """Save what is on disk."""
        self.index.save()

    def add(self, files: list[list[Key]]) -> None:
        """Add files."""
        new = {f"file {self.added + number}": keys for number, keys in enumerate(files)}
        self.added += len(new)
        self.files |= new
        self.index.add({path: (hashes(keys), np.arange(len(keys))) for path, keys in new.items()})

    def forget(self, choice: int) -> None:
        """Forget one file."""
        if self.files:
            path = sorted(self.files)[choice % len(self.files)]
            self.index.forget(path)
            del self.files[path]

    def wait(self, _: int) -> None:
        """Wait for the thread."""
        self.index._end_merge()

    def reopen(self, _: int) -> None:
        """Close the index and open it again: it then still has all of its files."""
        self.index.close()
        folder = self.folder / str(self.copies)
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8").partition("\n")[2])
        assert [file.name for file in run_files(folder)] == sorted(name for name, _, _ in manifest["runs"])
        self._open(folder)
        assert set(self.index.files) == set(self.files)

    def crash(self, _: int) -> None:
        """Continue with the files as a killed process leaves them; what the manifest does not name is lost."""
        source, self.copies = self.folder / str(self.copies), self.copies + 1
        shutil.copytree(source, self.folder / str(self.copies))
        self.index.close()
        self._open(self.folder / str(self.copies))
        self.files = {path: keys for path, keys in self.files.items() if path in self.index.files}
        for path in self.index.files.keys() - self.files.keys():  # forgotten after the manifest was written
            self.index.forget(path)

    def _open(self, folder: Path) -> None:
        self.index, self.prepared = KeyIndex(folder, TABLE, ON_DISK), []
        assert not list(folder.glob("*.prepared"))

    def expected(self) -> list[tuple[Key, str, int]]:
        """Return the entries of all files."""
        return sorted((key, path, row) for path, keys in self.files.items() for row, key in enumerate(keys))

    def found(self) -> list[tuple[Key, str, int]]:
        """Return the entries that the index finds."""
        return found_in(self.index, KEYS)


FILES = st.lists(st.lists(st.sampled_from(KEYS), max_size=6), min_size=1, max_size=2)
STEPS = st.one_of(
    st.tuples(st.just("add"), FILES),
    st.tuples(
        st.sampled_from(["forget", "wait", "reopen", "crash", "prepare", "add_prepared", "save"]), st.integers(0, 9)
    ),
)


@examples(40)
@given(st.lists(STEPS, max_size=20))
def test_an_index_finds_what_a_dict_finds(steps: list[tuple[str, object]]) -> None:
    with TemporaryDirectory() as folder:
        model = Modelled(Path(folder))
        for action, choice in steps:
            # an add without files to add: one that the thread merges
            given_choice = [KEYS[:5]] if (action, type(choice)) == ("add", int) else choice
            getattr(model, action)(given_choice)
            assert model.found() == model.expected()
        model.reopen(0)
        assert model.found() == model.expected()
        model.index.close()


def test_a_merge_to_a_file_drops_the_entries_of_forgotten_files_and_no_others(tmp_path: Path) -> None:
    index, first, second = KeyIndex(tmp_path, TABLE, ON_DISK), random_keys(8), random_keys(6, seed=2)
    add(index, "a", first)
    index.forget("a")
    add(index, "b", second)
    index._end_merge()

    assert index.entries == 6
    assert found_in(index, first) == []
    assert found_in(index, second) == sorted((key, "b", row) for row, key in enumerate(second))
    index.close()
    assert KeyIndex(tmp_path, TABLE, ON_DISK).entries == 6


def test_large_runs_are_written_at_once_and_merged_piece_by_piece(tmp_path: Path) -> None:
    first, others = PIECE // 4, PIECE + PIECE // 4
    words = np.random.default_rng(1).integers(0, 1 << 64, (2, first + others), np.uint64)
    keys = KeyHashes(words[0], words[1])
    parts = {"a": slice(0, first), "b": slice(first, first + 7), "c": slice(first + 7, None)}
    index = KeyIndex(tmp_path, TABLE, ON_DISK)
    for path, part in parts.items():
        index.add({path: (KeyHashes(keys.high[part], keys.low[part]), np.arange(keys.high[part].size))})
        assert run_files(tmp_path) != []
        if path == "a":
            index.forget("a")
    index._end_merge()
    index.merge_runs()  # merges the run of the forgotten file with the merged ones
    index._end_merge()
    assert index.entries == others
    index.close()
    reopened = KeyIndex(tmp_path, TABLE, ON_DISK)
    found = reopened.find(keys)

    assert [len(run_files(tmp_path)), reopened.entries] == [1, others]
    in_c = found.files == reopened.files["c"]
    assert np.array_equal(np.sort(found.rows[in_c]), np.arange(others - 7))
    assert np.array_equal(found.wanted[in_c] - first - 7, found.rows[in_c])
    assert np.count_nonzero(~in_c) == 7


@pytest.mark.parametrize("size", [1, ON_DISK // 2, ON_DISK, 3 * ON_DISK])
def test_batches_of_equal_size_leave_few_runs(size: int, tmp_path: Path) -> None:
    index, keys = KeyIndex(tmp_path, TABLE, ON_DISK), random_keys(100 * size)
    for number in range(0, len(keys), size):
        add(index, str(number), keys[number : number + size])
        index._end_merge()

    sizes = [run.size for run in index._runs]
    assert all(sizes[place] >= GROWTH * sum(sizes[place + 1 :]) for place in range(len(sizes))), sizes
    assert len(found_in(index, keys)) == len(keys)
    index.close()


def test_runs_that_were_added_during_a_long_merge_are_merged_by_the_next_one(tmp_path: Path) -> None:
    index, keys, may_merge = KeyIndex(tmp_path, TABLE, ON_DISK), random_keys(200), Event()
    index._thread.submit(may_merge.wait, 60)
    for number in range(0, 196, 4):
        add(index, str(number), keys[number : number + 4])
    may_merge.set()
    index._end_merge()
    add(index, "last", keys[196:])
    index._end_merge()

    assert [run.size for run in index._runs] == [200]
    assert len(found_in(index, keys)) == len(keys)
    assert len(run_files(tmp_path)) == 1
    index.close()


MEMORY = """
import numpy as np
from pathlib import Path
from pipelines.sinks.delta.indexed.key_index import KeyHashes, KeyIndex

def mapped_or_allocated():
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile"))) // 1024

index, random, batch = KeyIndex(None, "table 1"), np.random.default_rng(1), 1 << 17

def add(batches):
    for _ in range(batches):
        words = random.integers(0, 1 << 64, (2, batch), np.uint64)
        keys = KeyHashes(words[0], words[1])
        index.add({str(index.entries): (keys, np.arange(batch))})
        assert index.find(keys).rows.size == batch
        index._end_merge()
        index.merge_runs()

add(6)
before = mapped_or_allocated()
add(18)
index._end_merge()
assert index.entries == 24 * batch
print(mapped_or_allocated() - before)
"""


def test_an_index_of_four_times_as_many_keys_needs_no_more_memory() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, timeout=120)
    added = ENTRY_BYTES * 18 * (1 << 17) >> 20

    assert int(done.stdout) < added / 5, f"{done.stdout} MiB for {added} MiB of entries"


def test_a_prepared_file_is_in_the_index_after_a_restart_and_one_that_was_not_added_is_removed(tmp_path: Path) -> None:
    index, keys = KeyIndex(tmp_path, TABLE, ON_DISK), random_keys(30)
    parts = (keys[:15], keys[15:], keys[15:])
    added, dropped, discarded = (index.prepare({index.new_number(): (hashes(part), np.arange(15))}) for part in parts)
    index.add_prepared({"a": min(added.numbers)}, added)
    index.discard(added)  # nothing, because it is in the index
    index.discard(discarded)
    assert [file.name for file in tmp_path.glob("*.prepared")] == [dropped.run.name]
    index.close()
    reopened = KeyIndex(tmp_path, TABLE, ON_DISK)

    assert found_in(reopened, keys) == sorted((key, "a", row) for row, key in enumerate(keys[:15]))
    assert not (tmp_path / dropped.run.name).exists()
    reopened.close()


def test_a_small_run_that_the_thread_merges_is_not_merged_twice(tmp_path: Path) -> None:
    index, keys, is_added = KeyIndex(tmp_path, TABLE, on_disk=100), random_keys(150), Event()
    index._thread.submit(is_added.wait, 60)  # the thread merges after that
    add(index, "large", keys[:90])
    add(index, "medium", keys[90:130])
    add(index, "small", keys[130:])
    is_added.set()
    index._end_merge()

    assert index.entries == len(keys)
    assert len(found_in(index, keys)) == len(keys)
    index.close()


def test_a_killed_process_leaves_an_index_with_every_entry_of_the_files_that_it_names(tmp_path: Path) -> None:
    keys, before = random_keys(206), KeyIndex(tmp_path / "index", TABLE, on_disk=100)
    add(before, "a", keys[:60])
    before.close()
    index = KeyIndex(tmp_path / "index", TABLE, on_disk=100)

    def after_kill(name: str) -> dict[str, int]:
        shutil.copytree(tmp_path / "index", tmp_path / name)
        copy = KeyIndex(tmp_path / name, TABLE, on_disk=100)
        found = found_in(copy, keys)
        return {path: sum(entry[1] == path for entry in found) for path in copy.files}

    add(index, "b", keys[60:81])  # is merged with the first run in memory
    index.save()
    assert after_kill("1") == {}
    add(index, "c", keys[81:101])
    add(index, "d", keys[101:186])  # is merged with the runs before it by the thread, which saves the manifest
    index._end_merge()
    add(index, "e", keys[186:])
    index.save()
    assert after_kill("2") == {"a": 60, "b": 21, "c": 20, "d": 85}
    index.close()


def test_keys_with_equal_high_words_differ_by_their_low_words(tmp_path: Path) -> None:
    index, keys = KeyIndex(tmp_path, TABLE), [(1 << 40, low) for low in range(200)]
    add(index, "a", keys)

    assert found_in(index, [keys[150], (1 << 40, 200)]) == [(keys[150], "a", 150)]


def test_more_matches_than_wanted_keys_are_all_found(tmp_path: Path) -> None:
    index, key = KeyIndex(tmp_path, TABLE), (5, 6)
    add(index, "a", [key] * 1_000)

    assert [row for _, _, row in found_in(index, [key])] == list(range(1_000))


def test_each_of_many_random_keys_is_found_once_and_an_absent_one_is_not() -> None:
    index, keys = KeyIndex(None, TABLE, on_disk=1_000), random_keys(20_000)
    for first in range(0, len(keys), 2_500):
        add(index, str(first), keys[first : first + 2_500])

    assert [key for key, _, _ in found_in(index, keys)] == sorted(keys)
    assert found_in(index, random_keys(1_000, seed=2)) == []
    index.close()


def test_hashes_in_order_give_the_same_run_as_in_any_order() -> None:
    high, low = (np.random.default_rng(1).integers(0, 2**63, 1_000).astype(np.uint64) for _ in range(2))
    places, order = np.arange(1_000, dtype=np.uint64), np.argsort(high)
    one = KeyRun.of(KeyHashes(high, low), places, [1])
    other = KeyRun.of(KeyHashes(high[order], low[order]), places[order], [1])
    for found, expected in zip(one.columns, other.columns, strict=True):
        assert np.array_equal(found, expected)


def test_an_empty_index_finds_nothing() -> None:
    index = KeyIndex(None, TABLE)
    assert found_in(index, KEYS) == []
    index.add({})
    add(index, "without rows", [])

    assert found_in(index, KEYS) == found_in(index, []) == []
    assert set(index.files) == {"without rows"}
    index.close()


def _cut(folder: Path) -> None:
    file = run_files(folder)[0]
    file.write_bytes(file.read_bytes()[:-24])


def _flip(at: int) -> Callable[[Path], None]:
    def flip(folder: Path) -> None:
        file = run_files(folder)[0]
        content = bytearray(file.read_bytes())
        content[at % len(content)] ^= 1
        file.write_bytes(content)

    return flip


def _lose(folder: Path) -> None:
    run_files(folder)[0].unlink()


def _swap(folder: Path) -> None:
    with TemporaryDirectory() as elsewhere:
        other = KeyIndex(Path(elsewhere), TABLE, ON_DISK)
        add(other, "a", random_keys(10, seed=3))
        other.close()
        shutil.copy(run_files(Path(elsewhere))[0], run_files(folder)[0])


def _rewrite_manifest(change: Callable[[str], str]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        manifest = folder / MANIFEST
        manifest.write_text(change(manifest.read_text(encoding="utf-8")), encoding="utf-8")

    return rewrite


def _with_checksum(**changed: object) -> Callable[[str], str]:
    def rewritten(text: str) -> str:
        content = json.dumps(json.loads(text.partition("\n")[2]) | changed)
        return f"{zlib.crc32(content.encode()):08x}\n{content}"

    return rewritten


def _no_text(folder: Path) -> None:
    (folder / MANIFEST).write_bytes(b"\xff\xfe\n{}")


def _manifest_folder(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / MANIFEST / "below").mkdir(parents=True)


DAMAGES = {
    "truncated run": _cut,
    "flipped first byte": _flip(0),
    "flipped low word": _flip(90),
    "flipped last byte": _flip(-1),
    "missing run": _lose,
    "run of another index": _swap,
    "truncated manifest": _rewrite_manifest(lambda text: text[:-3]),
    "empty manifest": _rewrite_manifest(lambda _: ""),
    "altered manifest": _rewrite_manifest(lambda text: text.replace('"a"', '"b"')),
    "manifest of another table": _rewrite_manifest(_with_checksum(table="table 2")),
    "manifest of another format": _rewrite_manifest(_with_checksum(format=2)),
    "manifest that is no text": _no_text,
    "manifest that is a folder": _manifest_folder,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_index_begins_again_and_leaves_no_file(damage: Callable[[Path], None], tmp_path: Path) -> None:
    keys, index = random_keys(10), KeyIndex(tmp_path, TABLE, ON_DISK)
    add(index, "a", keys)
    index.close()
    damage(tmp_path)
    with capture_logs() as logs:
        opened = KeyIndex(tmp_path, TABLE, ON_DISK)

    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert (opened.files, opened.entries) == ({}, 0)
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    add(opened, "a", keys[:5])
    opened.close()
    assert len(found_in(KeyIndex(tmp_path, TABLE, ON_DISK), keys)) == 5


def test_the_secret_of_an_index_stays_until_the_index_begins_again(tmp_path: Path) -> None:
    index = KeyIndex(tmp_path, TABLE, ON_DISK)
    add(index, "a", random_keys(10))
    index.close()
    reopened = KeyIndex(tmp_path, TABLE, ON_DISK)
    reopened.close()
    _lose(tmp_path)

    assert len(index.secret) == 16
    assert reopened.secret == index.secret
    assert KeyIndex(tmp_path, TABLE, ON_DISK).secret not in {index.secret, KeyIndex(None, TABLE).secret}


def test_a_small_index_has_no_files(tmp_path: Path) -> None:
    index = KeyIndex(tmp_path / "index", TABLE)
    for number in range(SMALL_FILES):
        add(index, str(number), random_keys(20, seed=number))
    index.close()

    assert not (tmp_path / "index").exists()


def test_an_index_of_few_keys_in_many_files_is_saved(tmp_path: Path) -> None:
    index = KeyIndex(tmp_path / "index", TABLE)
    for number in range(SMALL_FILES + 1):
        add(index, str(number), random_keys(20, seed=number))
    index.close()

    assert len(KeyIndex(tmp_path / "index", TABLE).files) == SMALL_FILES + 1


def test_a_saved_index_with_few_new_keys_keeps_its_files(tmp_path: Path) -> None:
    index, keys = KeyIndex(tmp_path, TABLE, on_disk=160), random_keys(60)
    add(index, "a", keys[:56])
    index.close()
    reopened = KeyIndex(tmp_path, TABLE, on_disk=160)
    add(reopened, "b", keys[56:])
    reopened.close()
    again = KeyIndex(tmp_path, TABLE, on_disk=160)

    assert again.files == {"a": 0}
    assert found_in(again, keys) == sorted((key, "a", row) for row, key in enumerate(keys[:56]))


def test_files_without_a_manifest_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a.run").write_bytes(bytes(48))
    (tmp_path / f".{MANIFEST}.tmp").write_text("{")
    index = KeyIndex(tmp_path, TABLE)

    assert index.files == {}
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]


def test_a_second_index_of_a_folder_works_in_a_temporary_folder(tmp_path: Path) -> None:
    first, keys = KeyIndex(tmp_path, TABLE, ON_DISK), random_keys(12)
    add(first, "a", keys[:6])
    second = KeyIndex(tmp_path, TABLE, ON_DISK)
    before = sorted(file.name for file in tmp_path.iterdir())
    for number in range(2):
        add(second, str(number), keys[number * 6 : number * 6 + 6])
    second.close()

    assert sorted(file.name for file in tmp_path.iterdir()) == before
    assert not second.folder.path.exists()
    first.close()
    assert set(KeyIndex(tmp_path, TABLE, ON_DISK).files) == {"a"}


def test_an_index_without_a_folder_leaves_nothing_behind() -> None:
    index, keys = KeyIndex(None, TABLE, ON_DISK), random_keys(12)
    for number in range(2):
        add(index, str(number), keys[number * 6 : number * 6 + 6])
    index._end_merge()
    assert run_files(index.folder.path) != []
    index.close()

    assert not index.folder.path.exists()


def test_an_index_whose_folder_vanishes_finds_everything_and_warns_once(tmp_path: Path) -> None:
    folder, keys = tmp_path / "index", random_keys(60)
    folder.mkdir()
    index = KeyIndex(folder, TABLE, ON_DISK)
    shutil.rmtree(folder)
    folder.write_text("a file", encoding="utf-8")
    with capture_logs() as logs:
        for number in range(10):
            add(index, str(number), keys[number * 6 : number * 6 + 6])
            index._end_merge()
        assert len(found_in(index, keys)) == len(keys)
        index.close()

    assert [entry["log_level"] for entry in logs] == ["warning"]


def test_an_index_whose_folder_cannot_be_made_works_in_a_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    index, keys = KeyIndex(tmp_path / "file", TABLE, ON_DISK), random_keys(6)
    add(index, "a", keys)

    assert len(found_in(index, keys)) == len(keys)
    index.close()


@pytest.fixture(name="full")
def _full(tmp_path: Path) -> Iterator[Path]:
    """A full file system with the folder of a closed index, of which file "a" has the first 6 random keys."""
    with small_file_system(tmp_path / "small") as place:
        index = KeyIndex(place / "index", TABLE, ON_DISK)
        add(index, "a", random_keys(6))
        index.close()
        with (place / "ballast").open("wb", buffering=0) as ballast:
            ballast.truncate(0)
            while _writes(ballast.write):
                pass
        yield place


def _writes(write: Callable[[bytes], int]) -> bool:
    try:
        return write(bytes(1 << 16)) > 0
    except OSError:
        return False


def test_an_index_on_a_full_disk_finds_everything_and_later_begins_with_what_was_written(full: Path) -> None:
    keys = random_keys(10_000)
    index = KeyIndex(full / "index", TABLE, ON_DISK)
    for number in range(1, 4):
        add(index, str(number), keys[number * 2_000 : number * 2_000 + 2_000])
        index._end_merge()
    assert len(found_in(index, keys)) == 6 + 6_000
    index.close()
    assert len(run_files(full / "index")) == 1
    (full / "ballast").unlink()
    reopened = KeyIndex(full / "index", TABLE, ON_DISK)

    assert found_in(reopened, keys) == sorted((key, "a", row) for row, key in enumerate(keys[:6]))
    add(reopened, "b", keys[6:20])
    reopened.close()
    assert len(run_files(full / "index")) <= 2
