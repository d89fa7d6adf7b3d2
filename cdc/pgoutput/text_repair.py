"""Undecodable values: text of an SQL_ASCII database that is not UTF-8, which no column of the log can hold.

Such a database declares no encoding, so the server converts and checks nothing and its bytes come as they were
stored. What is not UTF-8 is refused or rewritten here, in the frames and COPY lines themselves and so before any
string is made of it; a whole value is the unit, whatever its type. Databases of every other encoding are converted
by the server and never come here.

Under BASE64 a value that is not UTF-8 becomes PREFIX and the base64 of its bytes; so does one that begins with PREFIX
by itself, so that every value can be told back exactly. Under REPLACE information is lost: two keys may become one.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from typing import Final

from cdc.config.definition import Undecodable
from cdc.errors import MalformedFrame, UndecodableValue
from cdc.pgoutput.copy_decoder import Lines
from cdc.pgoutput.frames import FrameBatch
from cdc.pgoutput.messages import BeginMessage, Relation
from cdc.pgoutput.parse import HEADER, parse_frame
from cdc.position import Position
from cdc.table import TableSchema, topic

PREFIX: Final = b"base64:"
"""Before the base64 of a value under the policy of that name."""

_ROWS: Final = HEADER + 5
"""Where the tuples of an insert, update or delete begin: behind the letter and the OID."""
_ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)
_TO_ESCAPE: Final = re.compile(rb"[\\\b\f\n\r\t\v]")
_ESCAPES: Final = {b"\b": b"b", b"\f": b"f", b"\n": b"n", b"\r": b"r", b"\t": b"t", b"\v": b"v"}
_UNESCAPES: Final = {letter: raw for raw, letter in _ESCAPES.items()}
_NULL: Final = rb"\N"
_LINE: Final = re.compile(rb"[^\n]*\n|[^\n]+")


def repair_value(value: bytes, policy: Undecodable) -> bytes:
    """The value as UTF-8; raises UnicodeDecodeError under FAIL."""
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
    """Whether values within need no look: told by the bytes as a whole."""
    return raw.isascii() and (policy is not Undecodable.BASE64 or PREFIX not in raw)


class FrameTextRepair:
    """Frames of one replication session, plain transactions in order; call it with each batch before its decoder.

    About 1 µs per row of short ASCII text and 1.5 µs per value of other rows. Transactions at or below `after` are in
    the log and not looked at, nor is a frame that is not well-formed: its decoder says what is wrong.
    """

    def __init__(self, policy: Undecodable, after: Position) -> None:
        self._policy, self._after = policy, after
        self._relations: dict[int, Relation] = {}
        self._position = Position(0)

    def __call__(self, frames: FrameBatch) -> FrameBatch:
        """The same frames, values mended; raises UndecodableValue under FAIL."""
        mended_frames: list[bytes] = []
        changed = False
        for frame in frames:
            told = self._mend(frame)
            changed = changed or told != frame
            mended_frames.append(told)
        return FrameBatch.of(mended_frames) if changed else frames

    def _mend(self, frame: bytes) -> bytes:
        if frame[:1] != b"w":
            return frame
        kind = frame[HEADER : HEADER + 1]
        if kind in {b"I", b"U", b"D"}:
            clean = self._position <= self._after or needs_no_repair(frame[_ROWS:], self._policy)
            return frame if clean else self._row(frame)
        if kind in {b"B", b"R"}:
            self._note(frame)
        return frame

    def _note(self, frame: bytes) -> None:
        try:
            message = parse_frame(frame)
        except MalformedFrame:
            return
        if isinstance(message, Relation):
            self._relations[message.oid] = message
        elif isinstance(message, BeginMessage):
            self._position = Position.of(message.final_lsn, self._after.epoch)

    def _row(self, frame: bytes) -> bytes:
        out, at = [frame[:_ROWS]], _ROWS
        while at < len(frame):  # a letter K, O or N, and a tuple
            count = int.from_bytes(frame[at + 1 : at + 3], "big")
            out.append(frame[at : at + 3])
            at += 3
            for place in range(count):
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
                told = self._value(value, int.from_bytes(frame[HEADER + 1 : _ROWS], "big"), place)
                out += (len(told).to_bytes(4, "big"), told)
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
    """Chunks of whole lines of one COPY; call it with each before CopyDecoder.feed."""

    def __init__(self, policy: Undecodable, schema: TableSchema) -> None:
        self._policy, self._schema = policy, schema
        self._row = 0

    def __call__(self, lines: Lines) -> Lines:
        """The same lines, values mended; raises UndecodableValue under FAIL."""
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
        told = b"\t".join(self._field(field, place) for place, field in enumerate(fields))
        return told + b"\n" if ended else told

    def _field(self, field: bytes, place: int) -> bytes:
        if field == _NULL:
            return field
        try:
            value = repair_value(_ESCAPED.sub(lambda m: _UNESCAPES.get(m[1], m[1]), field), self._policy)
        except UnicodeDecodeError as error:
            sent = self._schema.sent
            column = sent[place].name if place < len(sent) else f"column {place + 1}"
            raise _undecodable(self._schema.topic, column, f"row {self._row} of its copy", error.start) from None
        return _TO_ESCAPE.sub(lambda m: b"\\" + _ESCAPES.get(m[0], m[0]), value)


def _undecodable(table: str, column: str, where: str, offset: int) -> UndecodableValue:
    return UndecodableValue(f"not UTF-8: column {column!r} of {table!r} in {where}, byte {offset} of the value")
