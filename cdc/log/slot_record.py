"""Record in the log's directory of the replication slot from which the log is written, and its start positions.

A copy writes it before the slot exists. A slot of that name with both positions was made by this log and never
confirmed by a reader, so a copy that was killed can drop it. An operator's command (`cdc slots recover`, `cdc slots
adopt`) writes it for a slot that exists, exactly as it is at that moment.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from cdc import atomic_file
from cdc.errors import LogCorrupt
from cdc.log.object_path import Root, as_root
from cdc.lsn import Lsn

NAME: Final = "_slot.json"
"""Under the log's root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """A slot with its positions, and the log and the server that it belongs to."""

    log_id: str
    """Of the log: a directory that was emptied contains another one."""
    system_id: str
    timeline: int
    database: str
    slot: str
    confirmed_flush: Lsn
    """The consistent point; moves as soon as a reader confirms anything."""
    restart_lsn: Lsn | None
    """None if the server has invalidated the slot."""
    adopted: bool = False
    """True for a slot that an operator made and assigned to this log: a copy begins at it, and never drops it."""


def read_slot_record(root: str | Root) -> SlotRecord | None:
    """The record of the log under root; None if there is none. Raises LogCorrupt if it cannot be read."""
    try:
        fields = json.loads((as_root(root) / NAME).read_text(encoding="utf-8"))
        confirmed, restart = fields.pop("confirmed_flush"), fields.pop("restart_lsn")
        return SlotRecord(
            confirmed_flush=Lsn.parse(confirmed), restart_lsn=None if restart is None else Lsn.parse(restart), **fields
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise LogCorrupt(
            f"{NAME!r} of the log cannot be read",
            remedy=f"run 'cdc slots ls', drop the slot if nobody needs it, then remove {NAME}",
        ) from exc


def write_slot_record(root: str | Root, record: SlotRecord) -> None:
    """Replace the record; durable when it returns."""
    restart = None if record.restart_lsn is None else str(record.restart_lsn)
    fields = {**asdict(record), "confirmed_flush": str(record.confirmed_flush), "restart_lsn": restart}
    atomic_file.replace(as_root(root) / NAME, json.dumps(fields).encode())
