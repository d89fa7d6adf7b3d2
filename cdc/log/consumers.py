"""Registered consumers of the log with their positions, stored in the log's directory.

The consumers are not in the catalog, so retention does not depend on the catalog. Each consumer has one small file,
which it replaces atomically.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from cdc import atomic_file
from cdc.boot_clock import BootTimestamp
from cdc.bucket_files import Root, as_root
from cdc.errors import LogCorrupt
from cdc.position import Position

FOLDER: Final = "_consumers"
"""Name of the folder under the log's root that contains the consumer files."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9-]{1,64}\Z")


@dataclass(frozen=True, slots=True)
class Consumer:
    """One registered consumer of the log.

    Retention keeps a segment until all consumers have passed it, but at most for `log.retain.max`.
    """

    uuid: str
    """Identifier of the consumer, which depends on the log and the target's path; the consumer's file has this name."""
    name: str
    """Display name, such as the name of the sink."""
    position: Position
    """Position up to which the consumer has durably stored all changes; 0 at first."""
    pinned: int | None = None
    """Version of the table `compacted` that the consumer reads; None while it reads only `changes`."""
    seen_at: int = 0
    """Time of the consumer's last report, in microseconds UTC."""
    boot: str = ""
    """Boot id of the machine at the last report; `up_us` counts from that boot (`cdc.boot_clock`)."""
    up_us: int = 0

    def __post_init__(self) -> None:
        if not _PLAIN.match(self.uuid):
            raise ValueError(f"a consumer's uuid must have 1 to 64 letters, digits and hyphens, got {self.uuid!r}")

    def to_json(self) -> dict[str, Any]:
        """Return the fields that commands and the API print."""
        return {
            "uuid": self.uuid,
            "name": self.name,
            "position": str(self.position),
            "pinned": self.pinned,
            "seen_at": self.seen_at,
        }

    def silent_us(self, now: BootTimestamp) -> int:
        """Return the microseconds from the consumer's last report to `now`."""
        return now.since(BootTimestamp(self.seen_at, self.boot, self.up_us))


def register(root: str | Root, consumer: Consumer) -> None:
    """Write or replace the file of a consumer; the file is durable when the function returns."""
    root = as_root(root)
    folder = root / FOLDER
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        atomic_file.sync(root)
    fields = consumer.to_json() | {"boot": consumer.boot, "up_us": consumer.up_us}
    atomic_file.replace(folder / f"{consumer.uuid}.json", json.dumps(fields).encode())


def list_consumers(root: str | Root) -> list[Consumer]:
    """Return every registered consumer, sorted by name. Raises LogCorrupt if a consumer file cannot be read."""
    return _by_name(_read(file) for file in (as_root(root) / FOLDER).glob("[!.]*.json"))


def find(root: str | Root, uuid: str) -> Consumer | None:
    """Return a registered consumer; None if it is not registered. Raises LogCorrupt if its file cannot be read."""
    return _read(as_root(root) / FOLDER / f"{uuid}.json")


def list_readable_consumers(root: str | Root) -> tuple[list[Consumer], list[str]]:
    """Return the consumers with readable files, sorted by name, and the UUIDs of consumers with unreadable files.

    Displays use this function, because they must not fail if one file is damaged.
    """
    found: list[Consumer | None] = []
    broken: list[str] = []
    for file in (as_root(root) / FOLDER).glob("[!.]*.json"):
        try:
            found.append(_read(file))
        except LogCorrupt:
            broken.append(file.stem)
    return _by_name(found), sorted(broken)


def forget(root: str | Root, uuid: str) -> bool:
    """Remove the file of a consumer, so that retention no longer waits for the consumer.

    Return False if no consumer with this UUID is registered.
    """
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
