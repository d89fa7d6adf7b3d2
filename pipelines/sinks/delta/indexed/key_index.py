"""Key index: finds the data file and the row number of every row that has a given key, without reading the target.

Theory. The index is a set of entries (key, place). A key is a 128-bit hash. A place is the number of a data file and a
row number in the file. Entries are never changed. An entry counts only while its data file is live and its row is not
deleted; the caller checks both. So surplus entries do no harm, and the order in which entries were added does not
matter. But no entry may be missing: `files` names each data file whose rows are all in the index, including deleted
rows. The caller adds each live file that `files` does not name.

Entries are stored in *runs*, each sorted by key. A run is merged with all later runs when it is less than GROWTH times
as large as they are together. So there are few runs, and an entry is merged only a few times. Hashes are
evenly distributed: a search in a run begins where the key is expected, and reads few pages of memory. A merged run of
at least ON_DISK entries is a file that is mapped into memory. A background thread merges and writes it. The run of a
rewritten data file is prepared by the thread that rewrites the file, and the runs of a whole index by a thread that
reads the keys of its target.

The run files and the manifest are a cache. They are not synced, but each has a checksum. If one of them is missing,
damaged or of another table, the index begins empty, and the caller adds the data files again. The index of a small
table has no files at all: it is built again faster than it is written.
"""

from __future__ import annotations

import json
import mmap
import os
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import structlog

from cdc.cached_njit import cached_njit
from pipelines.sinks.delta.indexed.index_folder import IndexFolder

GROWTH: Final = 3
"""Each run has at least this many times the entries of all later runs; otherwise they are merged."""
ON_DISK: Final = 1 << 16
"""A merged run with at least this many entries is a file, which a thread writes so that no batch waits.

Smaller runs are in memory until `close`. After a crash, their entries are read from the target again.
"""
LARGE: Final = 16
"""Multiple of ON_DISK. `add` writes a new run of at least LARGE * ON_DISK entries to a file before it returns. Such
large runs are added only while a whole index is built.
"""
SMALL: Final = 16
"""Divisor of ON_DISK. `close` does not save fewer entries than that, if they are of SMALL_FILES data files at most."""
SMALL_FILES: Final = 4
PIECE: Final = 1 << 18
"""Number of merged entries that `merge_to_file` has in memory at a time."""
MANY_KEYS: Final = 10_000
"""Number of keys from which a search reads a large part of a run, whose pages it then gives back."""
ENTRY_BYTES: Final = 24
"""Bytes of an entry: two 64-bit words of the key's hash, and one word with file number and row number."""
MANIFEST: Final = "manifest.json"
"""Name of the file that lists the run files and the indexed data files."""
_PREPARED: Final = ".prepared"
"""Suffix of the file of a run that `prepare` has written and `add_prepared` has not added yet."""
_FORMAT: Final = 1
_ROW_BITS: Final = 32
_ROW_MASK: Final = (1 << _ROW_BITS) - 1
_ALL_FILES: Final = np.empty(0, np.bool_)

log = structlog.get_logger("apply")


class KeyHashes(NamedTuple):
    """The hashes of some keys: two 64-bit words per key."""

    high: np.ndarray
    low: np.ndarray


class FoundRows(NamedTuple):
    """Result of a search for keys: three arrays of equal length, with one element per entry found."""

    wanted: np.ndarray
    """Index of the entry's key in the `KeyHashes` that were searched."""
    files: np.ndarray
    """Number of the data file, as in `KeyIndex.files`."""
    rows: np.ndarray
    """Row number in the data file, from 0."""


@cached_njit
def _search(
    run: tuple[np.ndarray, np.ndarray, np.ndarray],
    wanted: tuple[np.ndarray, np.ndarray],
    out: tuple[np.ndarray, np.ndarray],
) -> int:
    """Write the entries of a run that have a wanted key to `out`; return the number of such entries.

    If this number is greater than the size of `out`, the last entries are not written. run: high words, low words and
    places. wanted: high and low words. out: indexes in `wanted`, and places.
    """
    high, low, places = run
    wanted_high, wanted_low = wanted
    out_wanted, out_places = out
    size, found = high.size, 0
    scale = size / 18446744073709551616.0
    reach = int(size**0.5) + 1
    for number in range(wanted_high.size):
        key = wanted_high[number]
        guess = min(max(int(np.float64(key) * scale), 0), size - 1)
        # afterwards every hash up to `below` is smaller than the key, and every hash from `above` on is not
        step = reach
        if high[guess] < key:
            below, above = guess, min(guess + step, size)
            while above < size and high[above] < key:
                below, step = above, step * 2
                above = min(above + step, size)
        else:
            above, below = guess, max(guess - step, -1)
            while below >= 0 and high[below] >= key:
                above, step = below, step * 2
                below = max(below - step, -1)
        while above - below > 1:
            middle = (above + below) // 2
            if high[middle] < key:
                below = middle
            else:
                above = middle
        while above < size and high[above] == key:
            if low[above] == wanted_low[number]:
                if found < out_wanted.size:
                    out_wanted[found] = number
                    out_places[found] = places[above]
                found += 1
            above += 1
    return found


@cached_njit
def _merge_next(
    first: tuple[np.ndarray, ...], second: tuple[np.ndarray, ...], live: np.ndarray, at: np.ndarray,
    out: tuple[np.ndarray, ...],
) -> int:  # fmt: skip
    """Fill `out` with the next entries of two sorted runs that belong to live files; return their number.

    first, second, out: high words, low words and places. live: for each file number, whether the file is live; an empty
    array means that all files are live. at: the number of entries read so far from each run; this call updates it.
    """
    left, right, filled = at[0], at[1], 0
    while filled < out[0].size and (left < first[0].size or right < second[0].size):
        if right >= second[0].size or (left < first[0].size and first[0][left] <= second[0][right]):
            high, low, place = first[0][left], first[1][left], first[2][left]
            left += 1
        else:
            high, low, place = second[0][right], second[1][right], second[2][right]
            right += 1
        if live.size == 0 or live[place >> np.uint64(_ROW_BITS)]:
            out[0][filled], out[1][filled], out[2][filled] = high, low, place
            filled += 1
    at[0], at[1] = left, right
    return filled


@dataclass(frozen=True, slots=True)
class KeyRun:
    """A run of the key index: entries, sorted by the high word of the key's hash."""

    high: np.ndarray
    low: np.ndarray
    places: np.ndarray
    files: frozenset[int] = frozenset()
    """Numbers of the data files that have entries in the run; empty for a run that was loaded from a file."""
    name: str = ""
    """Name of the file with the entries; empty while they are in memory only."""
    checksum: int = 0
    mapped: mmap.mmap | None = None
    """The mapped file with the entries; None while they are in memory only."""

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(self.high.size)

    @classmethod
    def of(cls, hashes: KeyHashes, places: np.ndarray, files: Iterable[int]) -> KeyRun:
        """Return a run in memory with one entry per hash; sorted hashes need no time for sorting.

        files: the numbers of the data files in `places`.
        """
        if np.all(hashes.high[1:] >= hashes.high[:-1]):
            return cls(hashes.high, hashes.low, places, frozenset(files))
        order = np.argsort(hashes.high)
        return cls(hashes.high[order], hashes.low[order], places[order], frozenset(files))

    def merged(self, other: KeyRun) -> KeyRun:
        """Return a run in memory with the entries of both runs."""
        high, low, places = (np.empty(self.size + other.size, np.uint64) for _ in range(3))
        _merge_next(self.columns, other.columns, _ALL_FILES, np.zeros(2, np.int64), (high, low, places))
        return KeyRun(high, low, places, self._numbers() | other._numbers())

    def merge_to_file(self, other: KeyRun, live: np.ndarray, folder: Path) -> KeyRun:
        """Merge both runs into a new file of the folder, and return the merged run, mapped from this file.

        live: for each file number, whether the file is live. Entries of files that are not live are left out. If no
        entry is left, no file is written and the returned run is empty.
        """
        size = _count_live(self.places, live) + _count_live(other.places, live)
        self.release()
        other.release()
        pieces = tuple(np.empty(min(size, PIECE), np.uint64) for _ in range(3))
        if not size:
            return KeyRun(pieces[0], pieces[1], pieces[2])
        name, at, written = f"{uuid.uuid4().hex}.run", np.zeros(2, np.int64), 0
        with _new_file(folder / name) as file:
            while written < size:
                filled = _merge_next(self.columns, other.columns, live, at, pieces)
                for number, piece in enumerate(pieces):
                    file.seek(8 * (number * size + written))
                    file.write(piece[:filled].data)
                written += filled
                self.release()
                other.release()
        return self.load(folder, name, size, _checksum(folder / name))

    def release(self) -> None:
        """Give the pages of a mapped run back; they stay in the page cache, from which the next search maps them."""
        if self.mapped is not None:
            self.mapped.madvise(mmap.MADV_DONTNEED)

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """High words, low words and places, as read-only arrays."""
        return _read_only(self.high), _read_only(self.low), _read_only(self.places)

    def _numbers(self) -> frozenset[int]:
        return self.files or frozenset(np.unique(self.places >> np.uint64(_ROW_BITS)).tolist())

    def write(self, folder: Path, suffix: str = "") -> KeyRun:
        """Write the entries to a new file of the folder, and return the same run, mapped from that file."""
        name, checksum = f"{uuid.uuid4().hex}.run{suffix}", 0
        with _new_file(folder / name) as file:
            for words in (self.high, self.low, self.places):
                content = np.ascontiguousarray(words).data
                file.write(content)
                checksum = zlib.crc32(content, checksum)
        return self.load(folder, name, self.size, checksum)

    @classmethod
    def load(cls, folder: Path, name: str, size: int, checksum: int) -> KeyRun:
        """Map the file of a run into memory. size: number of entries. checksum: the value for `is_intact`."""
        with (folder / name).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        content = np.frombuffer(mapped, np.uint64)
        high, low, places = content[:size], content[size : 2 * size], content[2 * size :]
        return cls(high, low, places, name=name, checksum=checksum, mapped=mapped)

    def is_intact(self, folder: Path) -> bool:
        """Whether the run file matches its checksum. Reads the whole file, so that it is then in the page cache."""
        return self.places.size == self.low.size == self.high.size and _checksum(folder / self.name) == self.checksum

    def find(self, wanted: KeyHashes) -> tuple[np.ndarray, np.ndarray]:
        """Find the entries with a wanted key; return two arrays: the index in `wanted` and the place of each entry."""
        room = wanted.high.size + 16
        while True:
            numbers, places = np.empty(room, np.int64), np.empty(room, np.uint64)
            found = _search((self.high, self.low, self.places), (wanted.high, wanted.low), (numbers, places))
            if found <= room:
                if wanted.high.size >= MANY_KEYS:
                    self.release()
                return numbers[:found], places[:found]
            room = found


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """The entries of data files that are not in the index yet."""

    numbers: frozenset[int]
    """Numbers of the data files, from `KeyIndex.new_number`."""
    run: KeyRun


@dataclass(frozen=True, slots=True)
class _Merging:
    """A merge of neighbouring runs in the background thread of the index."""

    runs: Sequence[KeyRun]
    result: Future[KeyRun]


class KeyIndex:
    """The key index of one target. No two threads use it at the same time, except for `prepare` and `new_number`."""

    def __init__(self, folder: Path | None, table: str, on_disk: int = ON_DISK) -> None:
        """Open the index in a folder. It is empty if its files are damaged or belong to another table.

        If `folder` is None, cannot be written or is in use by another process, the index is in a temporary folder.
        table: identifies the target and its key columns. on_disk: see ON_DISK.
        """
        self._table, self._on_disk, self.folder = table, on_disk, IndexFolder(folder)
        self._runs: list[KeyRun] = []
        self._next, self._next_lock = 0, Lock()
        self.secret = os.urandom(16)
        """Key of the hash function, so that nobody can construct two keys with the same hash."""
        self._thread = ThreadPoolExecutor(1, "key-index")
        self._merging: _Merging | None = None
        self._is_refused = False
        """Whether the last write to the folder failed; if it did, the next failure is not logged."""
        self.files: dict[str, int] = {}
        """Path of a data file → its number, for every file that was added and not forgotten since."""
        self._saved = frozenset[str]()
        """Names of the run files that the manifest names."""
        if folder is not None and folder.exists():
            self._read()

    def add(self, hashes: Mapping[str, tuple[KeyHashes, np.ndarray]]) -> None:
        """Add data files to the index and to `files`. hashes: path → (hashes of its keys, row number of each hash)."""
        if not hashes:
            return
        numbers = {path: self.new_number() for path in hashes}
        self.files |= numbers
        run = _run_of({numbers[path]: keys for path, keys in hashes.items()})
        if run.size:
            self._runs.append(self._in_file(run) if run.size >= LARGE * self._on_disk else run)
            self.merge_runs()

    def prepare(self, hashes: Mapping[int, tuple[KeyHashes, np.ndarray]]) -> PreparedRun:
        """Sort the entries of data files for `add_prepared`. Any thread may call this while another uses the index.

        hashes: new number of a data file → (hashes of its keys, row number of each hash).
        """
        run = _run_of(hashes)
        if run.size >= self._on_disk:
            with suppress(OSError):  # the run stays in memory; a write by the other thread logs what is wrong
                run = run.write(self.folder.path, _PREPARED)
        return PreparedRun(frozenset(hashes), run)

    def add_prepared(self, numbers: Mapping[str, int], prepared: PreparedRun) -> None:
        """Add data files to the index and to `files`, at a cost that does not depend on their number of rows.

        numbers: path → number. A prepared file that it leaves out is not added, so its entries do not count.
        """
        run = prepared.run
        self.files |= numbers
        if run.name:
            name = run.name.removesuffix(_PREPARED)
            try:
                (self.folder.path / run.name).rename(self.folder.path / name)
                run = replace(run, name=name)
            except OSError as exc:
                self._report(exc)
                run = replace(run, name="", files=prepared.numbers)
        if run.size:
            self._runs.append(run)
            self.merge_runs()

    def discard(self, prepared: PreparedRun) -> None:
        """Remove the file of a prepared run that is not added."""
        if prepared.run.name:
            with suppress(OSError):
                (self.folder.path / prepared.run.name).unlink()

    def forget(self, path: str) -> None:
        """Remove from `files` a file that is no longer live. Its number is not reused, so its entries do not count."""
        self.files.pop(path, None)

    def find(self, wanted: KeyHashes) -> FoundRows:
        """Return every entry with a wanted key, including entries of deleted rows and of files that left the table."""
        # a search in the order of the keys reads neighbouring pages
        order = np.argsort(wanted.high)
        ordered = KeyHashes(wanted.high[order], wanted.low[order])
        found = [run.find(ordered) for run in self._runs]
        numbers = np.concatenate([number for number, _ in found] or [np.empty(0, np.int64)])
        places = np.concatenate([place for _, place in found] or [np.empty(0, np.uint64)])
        files, rows = file_and_row(places)
        return FoundRows(order[numbers], files, rows)

    @property
    def entries(self) -> int:
        """Number of entries in all runs, including entries that no longer count."""
        return sum(run.size for run in self._runs)

    def close(self) -> None:
        """Write the runs that are only in memory to a file, unless they are small, and unlock the folder.

        A temporary folder is deleted.
        """
        if self._merging is not None:
            self._merging.result.cancel()
        self._thread.shutdown(cancel_futures=True)
        self._end_merge()
        if self.folder.is_temporary:
            self._runs = []
        elif not self._can_stay_unsaved():
            try:
                self._write_all()
            except OSError as exc:
                self._report(exc)
        self.folder.close()

    def _can_stay_unsaved(self) -> bool:
        """Whether the manifest names all run files, and the next open needs to read only a few rows of the table."""
        small = [run for run in self._runs if not run.name]
        return (
            self._saved >= {run.name for run in self._runs if run.name}
            and sum(len(run.files) for run in small) <= SMALL_FILES
            and sum(run.size for run in small) < self._on_disk // SMALL
        )

    def new_number(self) -> int:
        """Return the number of a data file that will be added. Any thread may call this."""
        with self._next_lock:
            self._next += 1
            return self._next - 1

    def save(self) -> None:
        """Save what is on disk, so that a process that is killed need not read the keys of these files again.

        While two runs are being merged, the end of this merge saves the index.
        """
        if self._merging is None:
            try:
                self._save()
            except OSError as exc:
                self._report(exc)

    def _in_file(self, run: KeyRun) -> KeyRun:
        """Write a run to a file, and return the run mapped from this file; if the write fails, return `run` itself."""
        try:
            return run.write(self.folder.path)
        except OSError as exc:
            self._report(exc)
            return run

    def merge_runs(self) -> None:
        """Merge the last runs if one of them is less than GROWTH times as large as all later runs together.

        A merge of ON_DISK entries or more begins in the thread; this method does not wait for it.
        """
        self._end_merge(wait=False)
        place = self._place_to_merge()
        if place is None:
            return
        runs = self._runs[place:]
        if sum(run.size for run in runs) < self._on_disk:
            self._runs[place:] = [_merged(runs)]
        elif self._merging is None:
            live = np.zeros(self._next, np.bool_)
            live[list(self.files.values())] = True
            self._merging = _Merging(runs, self._thread.submit(_merge_to_file, runs, live, self.folder.path))

    def _place_to_merge(self) -> int | None:
        """Return the number of the first run to merge with all later runs; None if the last runs stay as they are.

        Runs that the thread merges, and the runs before them, stay as they are.
        """
        place, later = None, 0
        last_merging = None if self._merging is None else self._merging.runs[-1]
        for number in range(len(self._runs) - 1, -1, -1):
            run = self._runs[number]
            if run is last_merging:
                break
            if run.size < GROWTH * later:
                place = number
            later += run.size
        return place

    def _end_merge(self, *, wait: bool = True) -> None:
        """If the thread has finished a merge, replace its runs by the result. wait: wait for the merge first."""
        merging = self._merging
        if merging is None or not (wait or merging.result.done()):
            return
        self._merging = None
        try:
            merged = merging.result.result()
            place = next(number for number, run in enumerate(self._runs) if run is merging.runs[0])
            self._runs[place : place + len(merging.runs)] = [merged] if merged.size else []
            self._save()
        except CancelledError:
            return
        except OSError as exc:  # the entries are still in memory; the next merge of runs tries again
            self._report(exc)

    def _report(self, exc: OSError) -> None:
        """Log a failed write, unless the write before it failed too."""
        if not self._is_refused:
            log.warning(
                "the key index of a target cannot be written; the index continues in memory",
                folder=str(self.folder.wanted or self.folder.path),
                reason=str(exc),
            )
        self._is_refused = True

    def _write_all(self) -> None:
        """Merge the runs that are only in memory into one file, and save the manifest."""
        small = [run for run in self._runs if not run.name]
        if small:
            self._runs = [*(run for run in self._runs if run.name), _merged(small).write(self.folder.path)]
        self._save()

    def _save(self) -> None:
        """Save the manifest; then remove the files of runs that it does not name."""
        on_disk = [run for run in self._runs if run.name]
        # a file is complete on disk only if no run in memory has entries of it
        missing = frozenset[int]().union(*(run.files for run in self._runs if not run.name))
        content = json.dumps(
            {
                "format": _FORMAT,
                "table": self._table,
                "secret": self.secret.hex(),
                "next": self._next,
                "files": {path: number for path, number in self.files.items() if number not in missing},
                "runs": [[run.name, run.size, run.checksum] for run in on_disk],
            }
        )
        folder = self.folder.path
        draft = folder / f".{MANIFEST}.tmp"
        draft.write_text(f"{zlib.crc32(content.encode()):08x}\n{content}", encoding="utf-8")
        draft.replace(folder / MANIFEST)
        self._saved = frozenset(run.name for run in on_disk)
        for file in folder.glob("*.run"):
            if file.name not in self._saved:
                file.unlink(missing_ok=True)
        self._is_refused = False

    def _read(self) -> None:
        """Load manifest and runs from the folder; if one is damaged or of another table, begin with an empty index."""
        folder = self.folder.path
        for file in folder.glob(f"*{_PREPARED}"):
            with suppress(OSError):
                file.unlink()
        try:
            manifest = _manifest(folder / MANIFEST)
        except FileNotFoundError:
            self.folder.clear()
            return
        except (OSError, ValueError) as exc:
            self._begin_again(str(exc))
            return
        if manifest.get("format") != _FORMAT or manifest.get("table") != self._table:
            self._begin_again("the files belong to another table or key, or have another format")
            return
        try:
            runs = [KeyRun.load(folder, name, size, checksum) for name, size, checksum in manifest["runs"]]
            self.secret = bytes.fromhex(manifest["secret"])
        except (OSError, ValueError) as exc:
            self._begin_again(str(exc))
            return
        if not all(run.is_intact(folder) for run in runs):
            self._begin_again("the content of a file does not match its checksum")
            return
        self._runs, self._next, self.files = (
            sorted(runs, key=lambda run: -run.size),
            manifest["next"],
            manifest["files"],
        )
        self._saved = frozenset(run.name for run in runs)

    def _begin_again(self, reason: str) -> None:
        log.warning(
            "the files of a key index cannot be used; the index will be built again from its target",
            folder=str(self.folder.path),
            reason=reason,
        )
        self.folder.clear()


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing; delete the file if opening or writing fails."""
    try:
        with path.open("wb") as file:
            yield file
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def places_of(number: int, rows: np.ndarray) -> np.ndarray:
    """Return the places of rows. number: the number of their data file."""
    return (np.uint64(number) << np.uint64(_ROW_BITS)) | rows.astype(np.uint64)


def _run_of(hashes: Mapping[int, tuple[KeyHashes, np.ndarray]]) -> KeyRun:
    """Return a run in memory with the entries of data files. hashes: as in KeyIndex.prepare."""
    keys = [found for found, _ in hashes.values()]
    whole = KeyHashes(np.concatenate([key.high for key in keys]), np.concatenate([key.low for key in keys]))
    places = [places_of(number, rows) for number, (_, rows) in hashes.items()]
    return KeyRun.of(whole, np.concatenate(places), hashes)


def file_and_row(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of the data file and the row number of each place."""
    return (places >> np.uint64(_ROW_BITS)).astype(np.int64), (places & np.uint64(_ROW_MASK)).astype(np.int64)


def _merged(runs: Sequence[KeyRun]) -> KeyRun:
    """Return a run in memory with the entries of all runs; the smallest runs, which are the last ones, come first."""
    whole = runs[-1]
    for run in reversed(runs[:-1]):
        whole = run.merged(whole)
    return whole


def _merge_to_file(runs: Sequence[KeyRun], live: np.ndarray, folder: Path) -> KeyRun:
    """Merge runs into a new file of the folder as `KeyRun.merge_to_file` does, the last and smallest runs first."""
    whole = runs[-1]
    for run in reversed(runs[:-1]):
        before, whole = whole, run.merge_to_file(whole, live, folder)
        if before.name and before is not runs[-1]:
            (folder / before.name).unlink(missing_ok=True)
    return whole


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file; it is read in pieces, because the pages of a mapped file would stay in memory."""
    checksum = 0
    with path.open("rb") as file:
        while content := file.read(PIECE):
            checksum = zlib.crc32(content, checksum)
    return checksum


def _count_live(places: np.ndarray, live: np.ndarray) -> int:
    """Return how many of the places are in live files. live: for each file number, whether the file is live."""
    pieces = (places[start : start + PIECE] for start in range(0, places.size, PIECE))
    return sum(int(np.count_nonzero(live[(piece >> np.uint64(_ROW_BITS)).astype(np.int64)])) for piece in pieces)


def _read_only(values: np.ndarray) -> np.ndarray:
    found = np.asarray(values)[:]
    found.flags.writeable = False
    return found


def _manifest(path: Path) -> dict[str, Any]:
    checksum, _, content = path.read_text(encoding="utf-8").partition("\n")
    if checksum != f"{zlib.crc32(content.encode()):08x}":
        raise ValueError("the content of the manifest does not match its checksum")
    return dict(json.loads(content))
