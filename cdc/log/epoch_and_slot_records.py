"""Two files in the log's directory that protect the start of an epoch: the pending epoch, and the slot of the log.

The initial snapshot of an epoch is one commit, so a killed process begins an epoch completely or not at all. The two
files record what the next process may do with the replication slot.

- `_epoch.json` requests a new epoch, and exists until the initial snapshot is committed. During this time the slot may
  be a new one, and the log cannot continue from the start of a new slot. So no reader resumes while the file exists.
- `_slot.json` records the slot's name, its confirmed position and its restart LSN. The reader writes the file just
  before it creates the slot. If a slot still has the recorded values, it belongs to this log, and no reader has
  confirmed a position since. So the next attempt of the initial snapshot may drop this slot, unless it was adopted.
  `cdc slots recover` and `cdc slots adopt` write the file for a slot that exists already.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from cdc import atomic_file
from cdc.bucket_files import Root, as_root
from cdc.errors import LogCorrupt
from cdc.lsn import Lsn

SLOT_RECORD_FILE: Final = "_slot.json"
"""Name of the file under the log's root that records the slot of the log."""
PENDING_EPOCH_FILE: Final = "_epoch.json"
"""Name of the file under the log's root that requests a new epoch."""


@dataclass(frozen=True, slots=True)
class PendingEpoch:
    """A request for a new epoch, as the file PENDING_EPOCH_FILE contains it."""

    epoch: int
    """Number of the new epoch; the request has no effect once the log is in this epoch."""
    reason: str
    """Why a new epoch is needed, as text for an operator."""


def read_pending_epoch(root: str | Root) -> PendingEpoch | None:
    """Read the request for a new epoch from the log under `root`; None if there is no request.

    Raises LogCorrupt if the file cannot be read.
    """
    try:
        fields = json.loads((as_root(root) / PENDING_EPOCH_FILE).read_text(encoding="utf-8"))
        return PendingEpoch(int(fields["epoch"]), str(fields["reason"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise LogCorrupt(f"file {PENDING_EPOCH_FILE!r} of the log cannot be read") from exc


def write_pending_epoch(root: str | Root, request: PendingEpoch) -> None:
    """Write or replace the request for a new epoch; the file is durable when the function returns."""
    atomic_file.replace(as_root(root) / PENDING_EPOCH_FILE, json.dumps(asdict(request)).encode())


def remove_pending_epoch(root: str | Root) -> None:
    """Remove the request for a new epoch if there is one."""
    (as_root(root) / PENDING_EPOCH_FILE).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """A replication slot with its positions, and the log and the source server to which it belongs."""

    log_id: str
    """Id of the log. A log that was created again in the same directory has a different id."""
    system_id: str
    timeline: int
    database: str
    slot: str
    confirmed_flush: Lsn
    """Confirmed position of the slot when the record was written.

    The slot's own value differs as soon as a reader has confirmed a position.
    """
    restart_lsn: Lsn | None
    """LSN from which the server kept WAL for the slot when the record was written; None for an invalidated slot."""
    adopted: bool = False
    """True if an operator created the slot and assigned it to this log; an initial snapshot never drops such a slot."""


def read_slot_record(root: str | Root) -> SlotRecord | None:
    """Read the slot record of the log under `root`; None if there is no record.

    Raises LogCorrupt if the file cannot be read.
    """
    try:
        fields = json.loads((as_root(root) / SLOT_RECORD_FILE).read_text(encoding="utf-8"))
        confirmed, restart = fields.pop("confirmed_flush"), fields.pop("restart_lsn")
        return SlotRecord(
            confirmed_flush=Lsn.parse(confirmed), restart_lsn=None if restart is None else Lsn.parse(restart), **fields
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise LogCorrupt(
            f"file {SLOT_RECORD_FILE!r} of the log cannot be read",
            remedy=f"run 'cdc slots ls'; if no other replication client uses the slot of this definition, "
            f"run 'cdc slots drop', then remove {SLOT_RECORD_FILE} from the log",
        ) from exc


def write_slot_record(root: str | Root, record: SlotRecord) -> None:
    """Write or replace the slot record; the file is durable when the function returns."""
    restart = None if record.restart_lsn is None else str(record.restart_lsn)
    fields = {**asdict(record), "confirmed_flush": str(record.confirmed_flush), "restart_lsn": restart}
    atomic_file.replace(as_root(root) / SLOT_RECORD_FILE, json.dumps(fields).encode())
