"""Request for a new epoch, stored in the log's directory until the copy is committed.

The copy is one commit, so an epoch is begun wholly or not at all. In between the old slot is gone and a new one
may stand where the log cannot go on; the file keeps a reader from mistaking that for a source it knows.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from cdc import atomic_file
from cdc.errors import LogCorrupt
from cdc.log.object_path import Root, as_root

NAME: Final = "_epoch.json"
"""Under the log's root."""


@dataclass(frozen=True, slots=True)
class PendingEpoch:
    """What was asked for."""

    epoch: int
    """The one to begin; of no weight once the log has reached it."""
    reason: str
    """In words for an operator."""


def read_pending_epoch(root: str | Root) -> PendingEpoch | None:
    """The intent beside the log under root; None if there is none. Raises LogCorrupt if it cannot be read."""
    try:
        fields = json.loads((as_root(root) / NAME).read_text(encoding="utf-8"))
        return PendingEpoch(int(fields["epoch"]), str(fields["reason"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise LogCorrupt(f"file {NAME!r} of the log cannot be read") from exc


def write_pending_epoch(root: str | Root, intent: PendingEpoch) -> None:
    """Put the intent beside the log; durable when it returns."""
    atomic_file.replace(as_root(root) / NAME, json.dumps(asdict(intent)).encode())


def remove_pending_epoch(root: str | Root) -> None:
    """Take it away; nothing happens if there is none."""
    (as_root(root) / NAME).unlink(missing_ok=True)
