"""Progress of a delivery: up to where the log was sent, and which keys wait as dead letters.

A destination that delivers exactly once stores the progress itself. For every other one it is a file next to the log,
`_deliveries/UUID.json`, which is replaced atomically. Each process that opens the file raises its generation. A process
that finds another generation than its own was overtaken, and stops.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from cdc import atomic_file
from cdc.bucket_files import Root
from cdc.config.deliveries import DeliverySettings
from cdc.errors import CdcError, DeadLetterLimitExceeded, DeliveryFenced, DeliveryOfAnotherLog, ProgressDamaged
from cdc.log import consumers
from cdc.position import ChangePosition, Position

FOLDER: Final = "_deliveries"
"""Name of the folder under the log's root that contains the files."""
FORMAT: Final = 1
ZERO: Final = Position(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedKey:
    """A dead letter of a delivery: a key with an event that was refused; its later events wait in the log."""

    first: ChangePosition
    """The refused change. The log has it, and every later change of the key."""
    relation: int | None
    """The log's number of the table; None for a logical message."""
    table: str
    """Name of the table, or prefix of the message."""
    topic: str
    """Topic of the event."""
    key: tuple[str | None, ...]
    """Texts of the key."""
    code: str = ""
    message: str = ""
    """Reason for which the first event was refused."""
    parked_at: int = 0
    """Time in microseconds UTC."""

    @property
    def identity(self) -> str:
        """The key whose events stay in order, as one text."""
        return order_key(self.topic, self.key)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "position": str(self.first.position),
            "ordinal": self.first.ordinal,
            "relation": self.relation,
            "table": self.table,
            "topic": self.topic,
            "key": list(self.key),
            "code": self.code,
            "message": self.message,
            "parked_at": self.parked_at,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Build a parked key from the result of `to_json`."""
        return cls(
            first=ChangePosition(Position.parse(fields["position"]), int(fields["ordinal"])),
            relation=fields["relation"],
            table=fields["table"],
            topic=fields["topic"],
            key=tuple(fields["key"]),
            code=fields["code"],
            message=fields["message"],
            parked_at=int(fields["parked_at"]),
        )


def order_key(topic: str, key: tuple[str | None, ...]) -> str:
    """Return the text that is equal for events whose order is kept: those of one topic and one key."""
    return json.dumps([topic, *key], ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a delivery has done. Every event up to `position` is acknowledged, dropped by policy, or of a parked key."""

    log_id: str
    position: Position = ZERO
    bootstrap: Position | None = None
    """Horizon of the compacted state that the delivery sends at first; None when it has sent all of it."""
    parked: Mapping[str, ParkedKey] = field(default_factory=dict)
    """Identity of each parked key → the key."""
    dropped: int = 0
    """Number of events that the overload policy has dropped."""
    generation: int = 0
    rewind: str | None = None
    """Name of the last request to rewind that was carried out; None if there was none."""

    def to_json(self) -> bytes:
        """Return the progress as it is stored."""
        fields = {
            "format": FORMAT,
            "log_id": self.log_id,
            "position": str(self.position),
            "bootstrap": None if self.bootstrap is None else str(self.bootstrap),
            "parked": [key.to_json() for key in self.parked.values()],
            "dropped": self.dropped,
            "generation": self.generation,
            "rewind": self.rewind,
        }
        return json.dumps(fields, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Build a progress from the result of `to_json`. Raises ValueError for anything else, or a newer format."""
        try:
            fields = json.loads(content)
            if fields["format"] != FORMAT:
                raise ValueError(f"unknown format of a delivery's progress: expected {FORMAT}")
            keys = [ParkedKey.from_json(one) for one in fields["parked"]]
            return cls(
                log_id=fields["log_id"],
                position=Position.parse(fields["position"]),
                bootstrap=None if fields["bootstrap"] is None else Position.parse(fields["bootstrap"]),
                parked={key.identity: key for key in keys},
                dropped=int(fields["dropped"]),
                generation=int(fields["generation"]),
                rewind=fields.get("rewind"),
            )
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError("the progress of a delivery is damaged") from exc

    @classmethod
    def parse(cls, content: bytes, place: object) -> Self:
        """Build a progress from the result of `to_json`; raises ProgressDamaged for anything else.

        place: where the content is stored, for the message.
        """
        try:
            return cls.from_json(content)
        except (ValueError, CdcError) as exc:
            raise ProgressDamaged(f"the stored progress of a delivery cannot be read: {place}") from exc

    @property
    def needed(self) -> Position:
        """Position after which the log must keep every change for this delivery."""
        firsts = (Position(max(0, key.first.position - 1)) for key in self.parked.values())
        return min((self.position, *firsts))

    def parking(self, letter: ParkedKey, reason: CdcError) -> Self:
        """Return the progress with one more parked key; a key that is parked already stays as it is."""
        if letter.identity in self.parked:
            return self
        parked = replace(letter, code=reason.code, message=reason.message, parked_at=time.time_ns() // 1000)
        return replace(self, parked={**self.parked, letter.identity: parked})

    def without(self, identity: str) -> Self:
        """Return the progress without one parked key."""
        return replace(self, parked={name: key for name, key in self.parked.items() if name != identity})

    def check_log(self, log_id: str, delivery: str) -> None:
        """Raise DeliveryOfAnotherLog if the progress belongs to another log."""
        if self.log_id != log_id:
            raise DeliveryOfAnotherLog(
                f"the progress of delivery {delivery!r} belongs to log {self.log_id}, but this is log {log_id}",
                remedy=f"give the delivery another name, or run 'cdc deliveries rewind {delivery}'",
            )


def check_progress(progress: Progress, log_id: str, settings: DeliverySettings) -> None:
    """Raise DeliveryOfAnotherLog if the progress belongs to another log, and DeadLetterLimitExceeded if it has too many
    dead letters.
    """
    progress.check_log(log_id, settings.name)
    if len(progress.parked) > settings.stop_at:
        raise DeadLetterLimitExceeded(
            f"delivery {settings.name!r} has {len(progress.parked):,} dead-letter keys, but may have at most "
            f"{settings.stop_at:,}"
        )


def delivery_uuid(log_id: str, name: str) -> str:
    """Return the id of a delivery as a consumer of a log."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"cdc:{log_id}/delivery/{name}"))


class ProgressFile:
    """The file with the progress of one delivery. The catalog's lease keeps a second process away; the generation of
    the file stops a process whose lease ended while it was paused.
    """

    def __init__(self, root: Root, log_id: str, name: str) -> None:
        self._folder, self._name = root / FOLDER, name
        self._root, self._log_id = root, log_id
        self._file = self._folder / f"{delivery_uuid(log_id, name)}.json"
        self._generation = 0

    def read(self) -> Progress | None:
        """Return the stored progress; None if there is none. Raises ProgressDamaged if the file is damaged."""
        try:
            return Progress.parse(self._file.read_bytes(), self._file)
        except FileNotFoundError:
            return None

    def registered(self) -> Position | None:
        """Return the position up to which the delivery was sent, as it is registered with the log; None if it never
        was. The delivery is registered only after its progress was stored.
        """
        consumer = consumers.find(self._root, delivery_uuid(self._log_id, self._name))
        return None if consumer is None else consumer.position

    def open(self, initial: Progress) -> Progress:
        """Return the stored progress, or `initial`, under a new generation, which fences every earlier process."""
        return self._begin(self.read() or initial)

    def begin_again(self, progress: Progress) -> None:
        """Store a progress in the place of one that is lost or damaged, and fence every earlier process."""
        # its generation is not known, and a count never reaches the number of microseconds since 1970
        self._begin(replace(progress, generation=time.time_ns() // 1000))

    def _begin(self, found: Progress) -> Progress:
        self._generation = found.generation + 1
        found = replace(found, generation=self._generation)
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            atomic_file.sync(self._root)
        atomic_file.replace(self._file, found.to_json())
        return found

    def write(self, progress: Progress) -> None:
        """Store the progress durably. Raises DeliveryFenced if another process has opened the file since `open`."""
        found = self.read()
        if found is None or found.generation != self._generation:
            raise DeliveryFenced(f"another process has begun to send delivery {self._name!r}")
        atomic_file.replace(self._file, replace(progress, generation=self._generation).to_json())
