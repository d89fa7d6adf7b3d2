"""The signal queue stores Debezium signals from the stream as files until they are processed.

A signal is stored before the log can contain its transaction, and processed after the log contains the transaction.
So a crash loses no signal. If Postgres sends the transaction again, the signal has the same position and content and
replaces its own file. So a crash duplicates no signal.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
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
from cdc.bucket_files import BucketPath, Root
from cdc.config import Secret
from cdc.errors import ConfigError, LogCorrupt, LogUnwritable
from cdc.failpoint import hit
from cdc.log_row import Operation
from cdc.pgoutput.decoder_events import SignalSeen
from cdc.table import TableSchema

FOLDER: Final = "_signals"
"""Name of the folder under the log's root that contains the signals."""
SIGNALS_LIMIT: Final = 1000
"""Maximum number of stored signals; each stored signal is a file.
"""
CONTENT_LIMIT: Final = 64 * 1024
"""Maximum size of one signal in bytes."""
WARNING_EVERY: Final = 60.0
"""Seconds between two warnings about messages without the secret."""
LOGGED_CHARACTERS: Final = 100
"""Maximum number of characters of a signal's id or type in a log message."""
CORRECT_SIGNAL: Final = "correct the signal and send it again"
"""Remedy for a malformed signal."""

log = structlog.get_logger("signals")


class SignalType(StrEnum):
    """Supported signal types, with Debezium's names."""

    #: Start backfills of tables.
    EXECUTE = "execute-snapshot"
    #: Cancel pending backfills.
    STOP = "stop-snapshot"
    #: Pause pending backfills.
    PAUSE = "pause-snapshot"
    #: Resume paused backfills.
    RESUME = "resume-snapshot"


_TYPES: Final = frozenset(kind.value for kind in SignalType)
_WINDOWS: Final = frozenset({"snapshot-window-open", "snapshot-window-close"})
"""Types of the rows that a Debezium connector writes into its signal table for its own chunks.

The queue ignores such rows without a log message.
"""


class Channel(StrEnum):
    """Channel through which a signal was sent; the channels require different rights at the source."""

    #: A row of the signal table; a role with INSERT on this table can send it.
    TABLE = "table"
    #: A logical message with the secret of the definition; any role can send one without it, which is ignored.
    MESSAGE = "message"


@dataclass(frozen=True, slots=True)
class Signal:
    """One signal as received; its body is not yet parsed."""

    position: int
    """Position of the transaction that contains the signal."""
    ordinal: int
    """Ordinal of the signal's row; for a message, the ordinal of the next row in the transaction.

    The ordinal may differ if Postgres sends the transaction again.
    """
    arrival: int
    """Number of the signal in order of arrival in this process; orders messages with the same ordinal."""
    channel: Channel
    id: str
    """Id that the sender has chosen; "" if the signal has none."""
    type: SignalType
    body: str
    """JSON document from Debezium's column `data`; "" if the signal has none."""

    @property
    def key(self) -> str:
        """Identity of the signal, from position and content; the same if the signal is received again."""
        content = json.dumps([self.channel, self.id, self.type, self.body]).encode()
        return f"{self.position:020d}-{hashlib.sha256(content).hexdigest()[:16]}"


class SignalQueue:
    """The stored signals of one log; one decoding thread and one processing thread may use the queue."""

    def __init__(self, root: Root, table: str | None = None, secret: Secret | None = None) -> None:
        """root: of the log. table: topic of the signal table; None if there is none. secret: that messages contain;
        None if no message is a signal.
        """
        self._folder, self._table, self._secret = root / FOLDER, table, secret
        self._warned_at = float("-inf")
        self._columns: dict[int, list[int]] = {}
        self._full = self._empty = False
        self._arrived = 0

    # called by the decoding thread

    def set_schema(self, schema: TableSchema) -> None:
        """Remember the column ids of the signal table, to decode its later rows; ignore other tables."""
        if schema.topic == self._table:
            self._columns[schema.relation] = [column.id for column in schema.sent]

    def store_rows(self, batch: pa.RecordBatch) -> None:
        """Store a signal for each row of the batch that was inserted into the signal table.

        The table's first three columns are id, type and data, whatever their names.
        """
        if not self._columns or pc.index(batch["topic"], pa.scalar(self._table)).as_py() < 0:
            return
        new = pc.and_(pc.equal(batch["topic"], self._table), pc.equal(batch["op"], Operation.CREATE.value))
        for row in batch.filter(new).select(["position", "ordinal", "relation", "after"]).to_pylist():
            image = dict(row["after"])
            first = [image.get(column) or "" for column in self._columns.get(row["relation"], [])[:3]]
            name, kind, body = [*first, "", "", ""][:3]
            self._store((row["position"], row["ordinal"]), Channel.TABLE, name, kind, body)

    def takes(self, content: bytes) -> bool:
        """Return True if a logical message contains the secret of the definition; a cheap check, without parsing.

        Every role that can connect can write such messages, so ignored ones are reported at most once in a minute.
        """
        secret = None if self._secret is None else self._secret.reveal().encode()
        if secret is not None and len(content) <= CONTENT_LIMIT and secret in content:
            return True
        if time.monotonic() - self._warned_at >= WARNING_EVERY:
            self._warned_at = time.monotonic()
            log.warning(
                "ignored signal messages: only a message with the secret of 'snapshot.signal_secret' is a signal",
                secret="set" if secret else "not set",
            )
        return False

    def store_message(self, seen: SignalSeen) -> None:
        """Store the signal of a logical message `{"id": …, "type": …, "data": {…}, "secret": …}`.

        `data` may be a JSON string. A message without the secret is ignored.
        """
        if self._secret is None or not self.takes(seen.content):
            return
        try:
            fields = parse_json_object(seen.content, f"the signal message at {seen.position!s}")
        except ConfigError as exc:
            log.warning("ignored a malformed signal", reason=exc.message, position=str(seen.position))
            return
        given = fields.pop("secret", None)
        if not isinstance(given, str) or not hmac.compare_digest(given.encode(), self._secret.reveal().encode()):
            return
        body = fields.get("data")
        text = "" if body is None else body if isinstance(body, str) else json.dumps(body)
        name = "" if fields.get("id") is None else str(fields["id"])
        self._store((int(seen.position), seen.ordinal), Channel.MESSAGE, name, str(fields.get("type")), text)

    def _store(self, order: tuple[int, int], channel: Channel, name: str, kind: str, body: str) -> None:
        if kind in _WINDOWS:
            return
        shown = {"id": name[:LOGGED_CHARACTERS], "type": kind[:LOGGED_CHARACTERS], "channel": channel.value}
        if kind not in _TYPES:
            log.warning("ignored a signal of an unknown type", **shown)
        elif len(name) + len(body) > CONTENT_LIMIT:
            log.warning("ignored a signal that is too large", **shown)
        elif self._has_room():
            with _as_log_errors():
                self._arrived += 1
                signal = Signal(*order, self._arrived, channel, name, SignalType(kind), body)
                self._folder.mkdir(exist_ok=True)
                atomic_file.replace(self._folder / f"{signal.key}.json", json.dumps(asdict(signal)).encode())
                self._empty = False
            hit("signal_kept")

    def _has_room(self) -> bool:
        full = sum(1 for _ in self._files()) >= SIGNALS_LIMIT
        if full and not self._full:
            log.warning("the queue of signals is full, so the reader ignores new signals", waiting=SIGNALS_LIMIT)
        self._full = full
        return not full

    # called by the processing thread

    def stored(self) -> list[Signal]:
        """Return all stored signals in stream order. Raises LogCorrupt if a file cannot be read."""
        # only this process stores signals, and each listing of an object store costs a request
        if self._empty and isinstance(self._folder, BucketPath):
            return []
        self._empty = True  # set first, because the decoding thread may store a signal meanwhile
        found = sorted(map(_read, self._files()), key=attrgetter("position", "ordinal", "arrival"))
        self._empty = self._empty and not found
        return found

    def remove(self, signal: Signal) -> None:
        """Remove a processed signal."""
        with _as_log_errors():
            (self._folder / f"{signal.key}.json").unlink(missing_ok=True)
            atomic_file.sync(self._folder)

    def _files(self) -> Iterator[Root]:
        # hidden files are incomplete
        return (path for path in self._folder.glob("*.json") if not path.name.startswith("."))


def parse_json_object(content: bytes | str, signal: str = "the signal") -> dict[str, Any]:
    """Parse a JSON object. Raises ConfigError if the content is malformed, too large, or not storable in Postgres.

    `signal` is the name of the signal in error messages.
    """
    if len(content) > CONTENT_LIMIT:
        raise ConfigError(
            f"{signal} has {len(content)} bytes: expected a JSON object of at most {CONTENT_LIMIT} bytes",
            remedy=CORRECT_SIGNAL,
        )
    try:
        fields = json.loads(content)
        text = json.dumps(fields, ensure_ascii=False)
        text.encode()
    except (ValueError, RecursionError):
        raise ConfigError(f"{signal} is malformed: expected a JSON object", remedy=CORRECT_SIGNAL) from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{signal} is malformed: expected a JSON object", remedy=CORRECT_SIGNAL)
    if "\\u0000" in text:
        raise ConfigError(f"{signal} is malformed: expected a JSON object without U+0000", remedy=CORRECT_SIGNAL)
    return fields


def _read(path: Root) -> Signal:
    try:
        fields = json.loads(path.read_bytes())
        return Signal(**{**fields, "channel": Channel(fields["channel"]), "type": SignalType(fields["type"])})
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise LogCorrupt(f"signal file {path.name!r} in the log's folder {FOLDER!r} cannot be read") from exc


@contextmanager
def _as_log_errors() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise LogUnwritable(f"signal files in the log's folder {FOLDER!r} cannot be written: {reason.lower()}") from exc
