"""Inbox: signals that the stream brought, on disk until they are carried out.

The rule: a signal is on disk before the log can hold its transaction, and is taken up only once the log does. So none
is lost, whenever the process dies, and none comes twice: the server sends again what the log does not hold, and then it
only replaces its own file, for position and content are the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import structlog

from cdc import atomic_file
from cdc.change import Operation
from cdc.errors import ConfigError, LogCorrupt, LogUnwritable
from cdc.failpoint import hit
from cdc.log.object_path import BucketPath, Root
from cdc.pgoutput.decoder_events import SignalSeen
from cdc.table import TableSchema

FOLDER: Final = "_signals"
"""Under the log's root."""
SIGNALS_LIMIT: Final = 1000
"""Signals that wait at most: anybody who may connect can write a message, and each costs a file."""
CONTENT_LIMIT: Final = 64 * 1024
"""Bytes of one signal."""
LOGGED_CHARACTERS: Final = 100
"""Characters of its id or type that are repeated in a log line."""

log = structlog.get_logger("signals")


class SignalType(StrEnum):
    """What can be asked for, in Debezium's words."""

    #: Read rows of tables again, beside the stream.
    EXECUTE = "execute-snapshot"
    #: End what is on its way.
    STOP = "stop-snapshot"
    #: Let what is on its way rest.
    PAUSE = "pause-snapshot"
    #: Let it go on.
    RESUME = "resume-snapshot"


_TYPES: Final = frozenset(kind.value for kind in SignalType)
_WINDOWS: Final = frozenset({"snapshot-window-open", "snapshot-window-close"})
"""What a Debezium connector that uses the same table writes for itself, twice per chunk: not worth a line."""


class Channel(StrEnum):
    """How a signal came, which says who can have sent it."""

    #: As a row of the table that the definition names: somebody who may insert there.
    TABLE = "table"
    #: As a logical message: anybody who may connect to the database.
    MESSAGE = "message"


@dataclass(frozen=True, slots=True)
class Signal:
    """One signal as it came; what it asks for in detail is not looked into yet."""

    position: int
    """Of its transaction."""
    ordinal: int
    """Of the next row of the transaction, or its own; may be another one when the transaction comes again."""
    arrival: int
    """Counted by the process: messages between two rows have one ordinal, and come before the second of them."""
    channel: Channel
    id: str
    """Its sender's; empty if there is none."""
    type: SignalType
    body: str
    """The JSON document in Debezium's column `data`; empty if there is none."""

    @property
    def key(self) -> str:
        """The same whenever it comes again, and no other signal's: position and content."""
        content = json.dumps([self.channel, self.id, self.type, self.body]).encode()
        return f"{self.position:020d}-{hashlib.sha256(content).hexdigest()[:16]}"


class SignalQueue:
    """The inbox of one log; safe for one thread that decodes and one that carries out."""

    def __init__(self, root: Root, table: str | None = None) -> None:
        """root: of the log; table: the topic of which each new row is a signal."""
        self._folder, self._table = root / FOLDER, table
        self._columns: dict[int, list[int]] = {}
        self._full = self._empty = False
        self._arrived = 0

    # the decoding thread

    def learn(self, schema: TableSchema) -> None:
        """The version by which rows of a relation are read from here on."""
        if schema.topic == self._table:
            self._columns[schema.relation] = [column.id for column in schema.sent]

    def rows(self, batch: pa.RecordBatch) -> None:
        """Keep the new rows of the table of signals: its first three columns are id, type and data, however named."""
        if not self._columns or pc.index(batch["topic"], pa.scalar(self._table)).as_py() < 0:
            return
        new = pc.and_(pc.equal(batch["topic"], self._table), pc.equal(batch["op"], Operation.CREATE.value))
        for row in batch.filter(new).select(["position", "ordinal", "relation", "after"]).to_pylist():
            image = dict(row["after"])
            first = [image.get(column) or "" for column in self._columns.get(row["relation"], [])[:3]]
            name, kind, body = [*first, "", "", ""][:3]
            self._keep((row["position"], row["ordinal"]), Channel.TABLE, name, kind, body)

    def message(self, seen: SignalSeen) -> None:
        """Keep a signal that came as `{"id": …, "type": …, "data": {…}}`, where data may be a text of JSON as well."""
        try:
            fields = parse_json_object(seen.content)
        except ConfigError as exc:
            log.warning("a signal is ignored", reason=exc.message, position=str(seen.position))
            return
        body = fields.get("data")
        text = "" if body is None else body if isinstance(body, str) else json.dumps(body)
        name = "" if fields.get("id") is None else str(fields["id"])
        self._keep((int(seen.position), seen.ordinal), Channel.MESSAGE, name, str(fields.get("type")), text)

    def _keep(self, place: tuple[int, int], channel: Channel, name: str, kind: str, body: str) -> None:
        if kind in _WINDOWS:
            return
        shown = {"id": name[:LOGGED_CHARACTERS], "type": kind[:LOGGED_CHARACTERS], "channel": channel.value}
        if kind not in _TYPES:
            log.warning("a signal of an unknown type is ignored", **shown)
        elif len(name) + len(body) > CONTENT_LIMIT:
            log.warning("a signal is too large and ignored", **shown)
        elif self._has_room():
            with _as_log_errors():
                self._arrived += 1
                signal = Signal(*place, self._arrived, channel, name, SignalType(kind), body)
                self._folder.mkdir(exist_ok=True)
                atomic_file.replace(self._folder / f"{signal.key}.json", json.dumps(asdict(signal)).encode())
                self._empty = False
            hit("signal_kept")

    def _has_room(self) -> bool:
        full = sum(1 for _ in self._files()) >= SIGNALS_LIMIT
        if full and not self._full:
            log.warning("signals are ignored until some of those that wait are carried out", waiting=SIGNALS_LIMIT)
        self._full = full
        return not full

    # the thread that carries out

    def waiting(self) -> list[Signal]:
        """All that are kept, in the order of the stream; raises LogCorrupt for a file that is none of ours."""
        # nobody else keeps any, and each look into an object store is paid for
        if self._empty and isinstance(self._folder, BucketPath):
            return []
        self._empty = True  # first: what is kept from here on says otherwise
        found = sorted(map(_read, self._files()), key=attrgetter("position", "ordinal", "arrival"))
        self._empty = self._empty and not found
        return found

    def remove(self, signal: Signal) -> None:
        """Forget one that was carried out."""
        with _as_log_errors():
            (self._folder / f"{signal.key}.json").unlink(missing_ok=True)
            atomic_file.sync(self._folder)

    def _files(self) -> Iterator[Root]:
        # a hidden one is a draft
        return (path for path in self._folder.glob("*.json") if not path.name.startswith("."))


def parse_json_object(content: bytes | str) -> dict[str, Any]:
    """A JSON object; raises ConfigError for anything else, and for text that no Postgres could hold."""
    if len(content) > CONTENT_LIMIT:
        raise ConfigError(f"expected a JSON object of at most {CONTENT_LIMIT} bytes, got {len(content)}")
    try:
        fields = json.loads(content)
        told = json.dumps(fields, ensure_ascii=False)
        told.encode()
    except (ValueError, RecursionError):
        raise ConfigError("expected a JSON object") from None
    if not isinstance(fields, dict) or "\\u0000" in told:
        raise ConfigError("expected a JSON object without U+0000")
    return fields


def _read(path: Root) -> Signal:
    try:
        fields = json.loads(path.read_bytes())
        return Signal(**{**fields, "channel": Channel(fields["channel"]), "type": SignalType(fields["type"])})
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise LogCorrupt(f"signal {path.name!r} beside the log cannot be read") from exc


@contextmanager
def _as_log_errors() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise LogUnwritable(f"signals cannot be kept beside the log: {reason.lower()}") from exc
