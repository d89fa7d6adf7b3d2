"""Registered consumers of the log with their positions, stored in the log's directory.

They are not in the catalog, so that retention does not depend on it. Each consumer replaces its own small file
atomically.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from cdc import atomic_file
from cdc.errors import LogCorrupt
from cdc.log.boot_clock import BootTimestamp
from cdc.log.object_path import Root, as_root
from cdc.position import Position

FOLDER: Final = "_consumers"
"""Under the log's root."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9-]{1,64}\Z")


@dataclass(frozen=True, slots=True)
class Consumer:
    """One consumer of the log; trimming waits for its position."""

    uuid: str
    """Stable for one target; names its file."""
    name: str
    """Display name, such as that of the sink."""
    position: Position
    """Everything up to this position is durably stored at the consumer; 0 at first."""
    pinned: int | None = None
    """Version of `compacted` that it reads; None while it reads only `changes`."""
    seen_at: int = 0
    """Microseconds UTC of its last report."""
    boot: str = ""
    """Boot id of the machine of the last report, which `up_us` belongs to: see cdc.log.boot_clock."""
    up_us: int = 0

    def __post_init__(self) -> None:
        if not _PLAIN.match(self.uuid):
            raise ValueError(f"consumer's uuid must be letters, digits and hyphens, got {self.uuid!r}")

    def to_json(self) -> dict[str, Any]:
        """The fields that commands and the API print."""
        return {
            "uuid": self.uuid,
            "name": self.name,
            "position": str(self.position),
            "pinned": self.pinned,
            "seen_at": self.seen_at,
        }

    def silent_us(self, now: BootTimestamp) -> int:
        """Microseconds since its last report."""
        return now.since(BootTimestamp(self.seen_at, self.boot, self.up_us))


def register(root: str | Root, consumer: Consumer) -> None:
    """Write or replace the record of a consumer; durable when the call returns."""
    root = as_root(root)
    folder = root / FOLDER
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        atomic_file.sync(root)
    fields = consumer.to_json() | {"boot": consumer.boot, "up_us": consumer.up_us}
    atomic_file.replace(folder / f"{consumer.uuid}.json", json.dumps(fields).encode())


def list_consumers(root: str | Root) -> list[Consumer]:
    """Every registered consumer, by name; raises LogCorrupt if a file cannot be read."""
    return _by_name(_read(file) for file in (as_root(root) / FOLDER).glob("[!.]*.json"))


def list_readable_consumers(root: str | Root) -> tuple[list[Consumer], list[str]]:
    """All consumers with a readable file, by name, and the UUIDs of the others; for displays."""
    found: list[Consumer | None] = []
    broken: list[str] = []
    for file in (as_root(root) / FOLDER).glob("[!.]*.json"):
        try:
            found.append(_read(file))
        except LogCorrupt:
            broken.append(file.stem)
    return _by_name(found), sorted(broken)


def forget(root: str | Root, uuid: str) -> bool:
    """Remove a consumer, so that retention no longer waits for it; False if it was not registered."""
    file = as_root(root) / FOLDER / f"{uuid}.json"
    if not _PLAIN.match(uuid) or not file.exists():
        return False
    file.unlink(missing_ok=True)
    atomic_file.sync(file.parent)
    return True


def _by_name(found: Iterable[Consumer | None]) -> list[Consumer]:
    # None: the consumer was removed after the listing
    return sorted((c for c in found if c is not None), key=lambda consumer: (consumer.name, consumer.uuid))


def _read(file: Root) -> Consumer | None:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        pinned = fields["pinned"]
        return Consumer(
            uuid=file.stem,
            name=str(fields["name"]),
            position=Position.parse(fields["position"]),
            pinned=None if pinned is None else int(pinned),
            seen_at=int(fields["seen_at"]),
            boot=str(fields.get("boot", "")),
            up_us=int(fields.get("up_us", 0)),
        )
    except FileNotFoundError:
        return None  # removed after the listing
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise LogCorrupt(f"consumer file {file.name!r} of the log cannot be read") from exc
