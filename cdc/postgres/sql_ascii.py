"""SQL_ASCII databases: how the reader finds them, and how it repairs their text, because the log contains only UTF-8.

Postgres converts the text of a database with any other encoding to UTF-8. It neither validates nor converts the text of
an SQL_ASCII database. This module rejects or rewrites invalid values in the frames and COPY lines of such a database,
before any string is created. It always rewrites a whole value, of any type.

The policy `source.undecodable` has three values. FAIL rejects a value that is not UTF-8. BASE64 replaces the value by
PREFIX and the base64 of its bytes. It also rewrites a valid value that begins with PREFIX, so that every value can be
restored exactly. REPLACE loses information: two keys may become equal.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias, TypeVar

import psycopg
from psycopg import sql

from cdc.config.source import Undecodable
from cdc.errors import MalformedFrame, UndecodableValue
from cdc.lsn import Lsn
from cdc.pgoutput.copy_decoder import Lines
from cdc.pgoutput.message_parser import HEADER, FrameBatch, parse_frame
from cdc.pgoutput.messages import BeginMessage, Relation
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.table import TableSchema, topic

T = TypeVar("T")
RepairFrames: TypeAlias = Callable[[FrameBatch], FrameBatch]
RepairLines: TypeAlias = Callable[[TableSchema], Callable[[Lines], Lines]]

PREFIX: Final = b"base64:"
"""Prefix of base64 values under the policy BASE64."""

_ROWS: Final = HEADER + 5
"""Offset in a frame of the tuples of an insert, update or delete, after letter and OID."""
_PREFIX: Final = HEADER + 10
"""Offset in a frame of the prefix of a logical message, after letter, flags and LSN."""
_ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)
_TO_ESCAPE: Final = re.compile(rb"[\\\b\f\n\r\t\v]")
_ESCAPES: Final = {b"\b": b"b", b"\f": b"f", b"\n": b"n", b"\r": b"r", b"\t": b"t", b"\v": b"v"}
_UNESCAPES: Final = {letter: raw for raw, letter in _ESCAPES.items()}
_NULL: Final = rb"\N"
_LINE: Final = re.compile(rb"[^\n]*\n|[^\n]+")
_RAW: Final = "SQL_ASCII"


def unchanged(value: T) -> T:
    """Return the value without a repair, for databases whose text Postgres converts to UTF-8."""
    return value


def frame_text_repair(dsn: str, policy: Undecodable, after: Position) -> RepairFrames:
    """Return the function that repairs batches of frames before they are decoded.

    Frames of transactions at or below `after` stay unchanged. If the database is not SQL_ASCII, the function changes
    nothing.
    """
    with connect(dsn, application_name="cdc encoding") as conn:
        return FrameTextRepair(policy, after) if is_sql_ascii(conn) else unchanged


def copy_text_repair(dsn: str, policy: Undecodable) -> RepairLines:
    """Return a function that takes a table's schema and returns the repair function for COPY lines of the table.

    If the database is not SQL_ASCII, the lines stay unchanged.
    """
    with connect(dsn, application_name="cdc encoding") as conn:
        return copy_text_repair_of(conn, policy)


def copy_text_repair_of(conn: psycopg.Connection, policy: Undecodable) -> RepairLines:
    """Return the function of `copy_text_repair` for the database of a connection."""
    raw = is_sql_ascii(conn)
    return lambda schema: CopyTextRepair(policy, schema) if raw else unchanged


def is_sql_ascii(conn: psycopg.Connection) -> bool:
    """Return True if the database has the encoding SQL_ASCII, so that Postgres does not check or convert its text."""
    return conn.info.parameter_status("server_encoding") == _RAW


def disable_encoding_conversion(conn: psycopg.Connection) -> None:
    """Make this session receive text exactly as it is stored, even if it is not UTF-8.

    Only for an SQL_ASCII database. psycopg returns text of this session as bytes until `SET client_encoding TO UTF8`.
    """
    conn.execute(sql.SQL("SET client_encoding TO {}").format(sql.Literal(_RAW)))


def repair_value(value: bytes, policy: Undecodable) -> bytes:
    """Return the value as valid UTF-8 according to the policy; raises UnicodeDecodeError under FAIL."""
    if policy is Undecodable.BASE64 and value.startswith(PREFIX):
        return PREFIX + b64encode(value)
    try:
        value.decode()
    except UnicodeDecodeError as error:
        match policy:
            case Undecodable.BASE64:
                return PREFIX + b64encode(value)
            case Undecodable.REPLACE:
                return value.decode(errors="replace").encode()
            case Undecodable.FAIL:
                raise error from None
    return value


def needs_no_repair(raw: bytes, policy: Undecodable) -> bool:
    """Return True if a quick check proves that no value in the bytes needs repair; False if a value may need it."""
    return raw.isascii() and (policy is not Undecodable.BASE64 or PREFIX not in raw)


class FrameTextRepair:
    """Repair of text in the frames of one replication session: plain transactions in order, before decoding.

    The repair costs about 1 µs per row of short ASCII text and 1.5 µs per value of other rows. Rows of
    transactions at or below `after` stay unchanged, because the log contains these transactions. Malformed frames stay
    unchanged, because the decoder rejects them.
    """

    def __init__(self, policy: Undecodable, after: Position) -> None:
        self._policy, self._after = policy, after
        self._relations: dict[int, Relation] = {}
        self._position = Position(0)

    def __call__(self, frames: FrameBatch) -> FrameBatch:
        """Return the frames with repaired values; raises UndecodableValue under FAIL."""
        repaired_frames: list[bytes] = []
        changed = False
        for frame in frames:
            repaired = self._repair(frame)
            changed = changed or repaired != frame
            repaired_frames.append(repaired)
        return FrameBatch.of(repaired_frames) if changed else frames

    def _repair(self, frame: bytes) -> bytes:
        if frame[:1] != b"w":
            return frame
        kind = frame[HEADER : HEADER + 1]
        if kind in {b"I", b"U", b"D"}:
            clean = self._position <= self._after or needs_no_repair(frame[_ROWS:], self._policy)
            return frame if clean else self._row(frame)
        if kind in {b"B", b"R"}:
            self._track(frame)
        return self._message(frame) if kind == b"M" else frame

    def _track(self, frame: bytes) -> None:
        try:
            message = parse_frame(frame)
        except MalformedFrame:
            return
        if isinstance(message, Relation):
            self._relations[message.oid] = message
        elif isinstance(message, BeginMessage):
            self._position = Position.of(message.final_lsn, self._after.epoch)

    def _message(self, frame: bytes) -> bytes:
        """Return the frame of a logical message with a repaired prefix; the content may be any bytes."""
        end = frame.find(b"\0", _PREFIX)
        prefix = frame[_PREFIX:end]
        if end < 0 or needs_no_repair(prefix, self._policy):
            return frame
        try:
            repaired = repair_value(prefix, self._policy)
        except UnicodeDecodeError as error:
            is_transactional, lsn = frame[HEADER + 1] & 1, Lsn(int.from_bytes(frame[HEADER + 2 : _PREFIX], "big"))
            position = self._position.lsn if is_transactional else lsn - 1
            if position > self._after.lsn:
                raise UndecodableValue(
                    f"the prefix of the logical message at {lsn} has a value that is not UTF-8 at byte {error.start}"
                ) from None
            # the decoder parses messages of dropped transactions too
            repaired = repair_value(prefix, Undecodable.REPLACE)
        return frame[:_PREFIX] + repaired + frame[end:]

    def _row(self, frame: bytes) -> bytes:
        out, at = [frame[:_ROWS]], _ROWS
        while at < len(frame):  # a letter K, O or N, and a tuple
            count = int.from_bytes(frame[at + 1 : at + 3], "big")
            out.append(frame[at : at + 3])
            at += 3
            for index in range(count):
                kind = frame[at : at + 1]
                out.append(kind)
                at += 1
                if kind != b"t":
                    continue
                size = int.from_bytes(frame[at : at + 4], "big")
                value = frame[at + 4 : at + 4 + size]
                if len(value) < size:
                    return frame
                at += 4 + size
                repaired = self._value(value, int.from_bytes(frame[HEADER + 1 : _ROWS], "big"), index)
                out += (len(repaired).to_bytes(4, "big"), repaired)
        return b"".join(out)

    def _value(self, value: bytes, oid: int, place: int) -> bytes:
        try:
            return repair_value(value, self._policy)
        except UnicodeDecodeError as error:
            relation = self._relations.get(oid)
            table = topic(relation.schema, relation.name) if relation else f"relation {oid}"
            columns = relation.columns if relation else ()
            column = columns[place].name if place < len(columns) else f"column {place + 1}"
            raise _undecodable(table, column, f"the transaction at {self._position}", error.start) from None


class CopyTextRepair:
    """Repair of text in the chunks of one COPY, each of whole lines; call it before CopyDecoder.feed."""

    def __init__(self, policy: Undecodable, schema: TableSchema) -> None:
        self._policy, self._schema = policy, schema
        self._row = 0

    def __call__(self, lines: Lines) -> Lines:
        """Return the lines with repaired values; raises UndecodableValue under FAIL."""
        lines = bytes(lines)
        if needs_no_repair(lines, self._policy):
            self._row += lines.count(b"\n")
            return lines
        return b"".join(self._lines(lines))

    def _lines(self, lines: bytes) -> Iterator[bytes]:
        for line in _LINE.findall(lines):
            yield line if needs_no_repair(line, self._policy) else self._line(line)
            self._row += 1

    def _line(self, line: bytes) -> bytes:
        ended = line.endswith(b"\n")
        fields = line.removesuffix(b"\n").split(b"\t")
        repaired = b"\t".join(self._field(field, index) for index, field in enumerate(fields))
        return repaired + b"\n" if ended else repaired

    def _field(self, field: bytes, place: int) -> bytes:
        if field == _NULL:
            return field
        try:
            value = repair_value(_ESCAPED.sub(lambda m: _UNESCAPES.get(m[1], m[1]), field), self._policy)
        except UnicodeDecodeError as error:
            sent = self._schema.sent
            column = sent[place].name if place < len(sent) else f"column {place + 1}"
            raise _undecodable(self._schema.topic, column, f"row {self._row} of the copy", error.start) from None
        return _TO_ESCAPE.sub(lambda m: b"\\" + _ESCAPES.get(m[0], m[0]), value)


def _undecodable(table: str, column: str, where: str, offset: int) -> UndecodableValue:
    return UndecodableValue(
        f"column {column!r} of table {table!r} has a value that is not UTF-8 at byte {offset}, in {where}"
    )
