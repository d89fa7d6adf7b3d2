"""What a disk may hold when a process or the machine dies, out of what strace saw the process do to it.

A killed process leaves exactly what its system calls did. A loss of power leaves at least what was synced: the bytes of
a file up to its last fsync, the names in a directory up to that of the directory. Of the rest any part may be there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from tests.faults import forked_strace
from tests.fixtures.waiting import PATIENCE

CALLS: Final = (
    "openat,write,pwrite64,pwritev,pwritev2,lseek,fsync,fdatasync,rename,renameat,renameat2,link,linkat,unlink,unlinkat,"
    "mkdir,mkdirat,rmdir,ftruncate"
)
_LINE: Final = re.compile(r"\d+ +(?P<at>[\d.]+) (?P<call>\w+)\((?P<args>.*)\) += (?P<result>-?\d+)")
_CUT: Final = re.compile(
    r"(?P<thread>\d+) +[\d.]+ (?:(?P<begun>\w+\(.*)<unfinished \.\.\.>|<\.\.\. \w+ resumed>(?P<rest>.*))"
)
_TEXT: Final = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_OPENED: Final = re.compile(r"^(\d+)<((?:\\x[0-9a-f]{2})*)")


class Death(Enum):
    """How."""

    KILL = "kill"
    """The process alone."""
    POWER_NAMES = "power, names that were not synced are lost"
    POWER_BYTES = "power, bytes that were not synced are lost"
    """The names are there: a file system that writes its journal at once and the data later."""
    POWER_PART = "power, half of the bytes that were not synced is lost"


@dataclass(frozen=True, slots=True)
class Call:
    """One system call that went well."""

    at: float
    name: str
    paths: tuple[str, ...]
    """Of its arguments; of what a file descriptor stands for at last."""
    handle: int
    content: bytes
    number: int
    """Its result, or for ftruncate the length."""
    flags: str


@dataclass(slots=True)
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: int = 0
    """Bytes from its beginning; no file is written to anew in its place."""
    written_at: float = 0.0


def traced(trace: Path, *command: object) -> list[Call]:
    """Run `python -m COMMAND…`; what it did to disks, in order."""
    options = ["-y", "-xx", "-ttt", "-s", "10000000", "-e", f"trace={CALLS}"]
    with trace.with_suffix(".out").open("w+") as output:
        with forked_strace.traced(options, trace, *command, output=output) as process:
            status = process.wait(PATIENCE)
        output.seek(0)
        assert status == 0, output.read()
    return [call for line in _whole(trace.read_text().splitlines()) if (call := _call(line)) is not None]


class Disk:
    """A folder, as a process sees it and as far as it is safe."""

    def __init__(self, before: Path, root: Path) -> None:
        """before: a copy of the folder as the process finds it, all of it synced; root: where that finds it."""
        self._root = str(root)
        found = {str(root / place.relative_to(before)): place for place in before.rglob("*")}
        self._files = {name: _loaded(place) for name, place in found.items() if place.is_file()}
        self._folders = {self._root, *(name for name, place in found.items() if place.is_dir())}
        self._safe_files, self._safe_folders = dict(self._files), set(self._folders)
        self._open: dict[int, tuple[_File, int]] = {}

    def apply(self, call: Call) -> bool:
        """Carry the call out; whether it changed what may be found."""
        if not call.paths or not call.paths[-1].startswith(self._root):
            if call.name == "openat":
                self._open.pop(call.number, None)
            return False
        return bool(_EFFECTS[call.name](self, call))

    def leave(self, death: Death, place: Path) -> None:
        """Make what is there after a death, in an empty folder of that name."""
        place.mkdir()
        names = self._safe_files if death is Death.POWER_NAMES else self._files
        folders = self._safe_folders if death is Death.POWER_NAMES else self._folders
        for folder in sorted(folders):
            if all(str(above) in folders for above in Path(folder).parents if str(above).startswith(self._root)):
                (place / Path(folder).relative_to(self._root)).mkdir(exist_ok=True)
        for path, file in names.items():
            target = place / Path(path).relative_to(self._root)
            if target.parent.is_dir():
                target.write_bytes(file.content[: _left(file, death)])
                os.utime(target, (file.written_at,) * 2)

    def _opened(self, call: Call) -> bool:
        path, changed = call.paths[-1], False
        if "O_DIRECTORY" in call.flags or path in self._folders:
            return False
        if path not in self._files:
            self._files[path], changed = _File(written_at=call.at), True
        if "O_TRUNC" in call.flags:
            changed = changed or bool(self._files[path].content)
            self._files[path].content.clear()
        self._open[call.number] = self._files[path], 0
        return changed

    def _written(self, call: Call) -> bool:
        file, at = self._open[call.handle]
        file.content[at : at + len(call.content)] = call.content
        file.written_at = call.at
        self._open[call.handle] = file, at + len(call.content)
        return True

    def _written_at(self, call: Call) -> bool:
        file, _ = self._open[call.handle]
        at = int(call.flags.rpartition(", ")[2])
        file.content[at : at + len(call.content)] = call.content
        file.written_at = call.at
        return True

    def _sought(self, call: Call) -> bool:
        if call.handle in self._open:
            self._open[call.handle] = self._open[call.handle][0], call.number
        return False

    def _cut(self, call: Call) -> bool:
        file, _ = self._open[call.handle]
        del file.content[call.number :]
        file.content.extend(bytes(call.number - len(file.content)))
        return True

    def _synced(self, call: Call) -> bool:
        path = call.paths[-1]
        if path in self._folders:
            inside = lambda name: os.path.dirname(name) == path  # noqa: E731, PTH120 - names, not places
            kept = {name: file for name, file in self._safe_files.items() if not inside(name)}
            self._safe_files = kept | {name: file for name, file in self._files.items() if inside(name)}
            self._safe_folders = {f for f in self._safe_folders if not inside(f)} | set(filter(inside, self._folders))
        else:
            self._files[path].synced = len(self._files[path].content)
        return True

    def _renamed(self, call: Call) -> bool:
        old, new = call.paths
        self._files[new] = self._files.pop(old)
        return True

    def _linked(self, call: Call) -> bool:
        old, new = call.paths
        self._files[new] = self._files[old]
        return True

    def _gone(self, call: Call) -> bool:
        self._files.pop(call.paths[-1], None)
        self._folders.discard(call.paths[-1])
        return True

    def _made(self, call: Call) -> bool:
        self._folders.add(call.paths[-1])
        return True


_EFFECTS: Final = {
    "openat": Disk._opened, "write": Disk._written, "pwrite64": Disk._written_at,
    "lseek": Disk._sought, "ftruncate": Disk._cut,
    "fsync": Disk._synced, "fdatasync": Disk._synced,
    "rename": Disk._renamed, "renameat": Disk._renamed, "renameat2": Disk._renamed,
    "link": Disk._linked, "linkat": Disk._linked, "unlink": Disk._gone, "unlinkat": Disk._gone, "rmdir": Disk._gone,
    "mkdir": Disk._made, "mkdirat": Disk._made,
}  # fmt: skip


def _left(file: _File, death: Death) -> int:
    """How many bytes of a file a death leaves."""
    least, most = file.synced, len(file.content)
    return {Death.KILL: most, Death.POWER_PART: (least + most) // 2}.get(death, least)


def _loaded(path: Path) -> _File:
    content = path.read_bytes()
    return _File(bytearray(content), len(content), path.stat().st_mtime)


def _whole(lines: Sequence[str]) -> Iterator[str]:
    """The lines of calls; one that another thread's came between is put together where it ended."""
    begun: dict[str, str] = {}
    for line in lines:
        cut = _CUT.match(line)
        if cut is None:
            yield line
        elif cut["begun"] is not None:
            begun[cut["thread"]] = line.partition("<unfinished")[0]
        else:
            yield begun.pop(cut["thread"]) + cut["rest"]


def _call(line: str) -> Call | None:
    found = _LINE.match(line)
    if found is None or int(found["result"]) < 0:
        return None
    args = found["args"]
    texts = [bytes.fromhex(text.replace("\\x", "")) for text in _TEXT.findall(args)]
    opened = _OPENED.match(args)
    paths = [os.fsdecode(text) for text in texts]
    if opened is not None:
        paths = [os.fsdecode(bytes.fromhex(opened[2].replace("\\x", "")))]
        if found["call"].endswith("at"):
            paths = [f"{paths[0]}/{os.fsdecode(texts[0])}"]
    length = args.rpartition(", ")[2] if found["call"] == "ftruncate" else found["result"]
    return Call(
        at=float(found["at"]),
        name=found["call"],
        paths=tuple(paths),
        handle=-1 if opened is None else int(opened[1]),
        content=texts[0] if texts else b"",
        number=int(length),
        flags=args,
    )
