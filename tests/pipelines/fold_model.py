"""The fold in plain Python: random histories of a small table, their replay row by row, and a target of folded rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any

import pyarrow as pa

from cdc.log_row import LOG_SCHEMA
from cdc.logical_message import message_key
from cdc.lsn import Lsn

Key = tuple[str, ...]
Image = dict[int, str | None]
Row = dict[str, Any]

KEYS = ("1", "2", "3", "4")
KEY_COLUMN, PLAIN, LARGE = 1, 2, (3, 4)
SINK, OTHER_SINK = "ours", "theirs"


def log_row(relation: int, place: tuple[int, int], op: str, **fields: Any) -> Row:
    """A log row; what is not named is null."""
    said = {
        "relation": relation,
        "topic": f"t.{relation}",
        "position": place[0],
        "ordinal": place[1],
        "op": op,
        "xid": 7,
    }
    moment = datetime.fromtimestamp(place[0], UTC)
    return dict.fromkeys(LOG_SCHEMA.names) | said | {"committed_at": moment, "partial": False} | fields


def message_row(place: tuple[int, int], prefix: str = "a") -> Row:
    """A logical message: a row of no table, whose key could be taken for that of a row."""
    key = message_key(prefix, Lsn(place[0]), transactional=True)
    return log_row(0, place, "m", key=key, payload=b"hello") | {"relation": None, "topic": None}


def to_arrow(rows: Iterable[Row]) -> pa.Table:
    """Rows as LOG_SCHEMA."""
    maps = [{**row, **{m: list(row[m].items()) for m in ("before", "after") if row[m] is not None}} for row in rows]
    return pa.Table.from_pylist(maps, schema=LOG_SCHEMA)


@dataclass
class Source:
    """A table with two columns that may go unsent, and the rows that its changes leave in the log."""

    relation: int
    random: Random
    table: dict[str, Image] = field(default_factory=dict)
    log: list[Row] = field(default_factory=list)
    position: int = 10

    def transaction(self) -> None:
        """One to four random changes at the next position."""
        self.position += 1
        first = len(self.log)
        for _ in range(self.random.randint(1, 4)):
            act = self.random.choices((self._put, self._change, self._delete, self._move), (3, 4, 2, 5))[0]
            act()
        if self.random.random() < 0.06:
            self._truncate()
        if self.random.random() < 0.08:
            self._copy()
        self.log[first:] = [{**row, "ordinal": n} for n, row in enumerate(self.log[first:])]

    def _row(self, op: str, **fields: Any) -> None:
        self.log.append(log_row(self.relation, (self.position, 0), op, **fields))

    def _value(self) -> str | None:
        return self.random.choice((None, "", *map(str, range(50))))

    def _new_image(self, key: str) -> Image:
        return {KEY_COLUMN: key, PLAIN: self._value(), **{column: self._value() for column in LARGE}}

    def _free(self) -> list[str]:
        return [key for key in KEYS if key not in self.table]

    def _put(self) -> None:
        if free := self._free():
            key = self.random.choice(free)
            self.table[key] = self._new_image(key)
            self._row("c", key=[key], after=dict(self.table[key]))

    def _sent(self, key: str) -> Row:
        """Change the row of a key; returns the new image as it is sent."""
        changed = [column for column in LARGE if self.random.random() < 0.4]
        image = self.table[key]
        image |= {KEY_COLUMN: key, PLAIN: self._value(), **{column: self._value() for column in changed}}
        sent = {c: v for c, v in image.items() if c not in LARGE or c in changed}
        return {"after": sent, "partial": len(sent) < len(image)}

    def _change(self) -> None:
        if self.table:
            key = self.random.choice(sorted(self.table))
            self._row("u", key=[key], **self._sent(key))

    def _delete(self) -> None:
        if self.table:
            key = self.random.choice(sorted(self.table))
            del self.table[key]
            self._row("d", key=[key], before={KEY_COLUMN: key})

    def _move(self) -> None:
        if self.table and (free := self._free()):
            old, new = self.random.choice(sorted(self.table)), self.random.choice(free)
            self.table[new] = self.table.pop(old)
            self._row("d", key=[old], before={KEY_COLUMN: old})
            self._row("u", key=[new], old_key=[old], before={KEY_COLUMN: old}, **self._sent(new))

    def _truncate(self) -> None:
        self.table.clear()
        self._row("t")

    def _copy(self) -> None:
        """A full copy in a transaction of its own, after a delete that the log never saw."""
        self.position += 1
        if self.table:
            del self.table[self.random.choice(sorted(self.table))]
        self._row("r", key=["1"], after={KEY_COLUMN: "1", PLAIN: "not yours"}, address=OTHER_SINK)
        for key, image in sorted(self.table.items()):
            self._row("r", key=[key], after=dict(image), address=self.random.choice((None, SINK)))
        self._row("g", payload=str(self.position).encode())
        self._row("t", address=OTHER_SINK)


@dataclass
class Target:
    """What a sink does with folded rows: places guard, bases are read before anything is written."""

    rows: dict[Key, tuple[tuple[int, int], Image]] = field(default_factory=dict)

    def apply(self, folded: Iterable[Row]) -> None:
        """Apply the folded rows of one range."""
        before = dict(self.rows)
        changes = list(folded)
        for row in changes:
            if row["op"] == "t":
                self._keep(lambda place, row=row: place >= (row["position"], row["ordinal"]))
            if row["op"] == "g":
                self._keep(lambda place, row=row: place[0] >= int(row["payload"]))
        for row in changes:
            self._apply_row(row, before)

    def _keep(self, stands: Any) -> None:
        self.rows = {key: held for key, held in self.rows.items() if stands(held[0])}

    def _apply_row(self, row: Row, before: dict[Key, tuple[tuple[int, int], Image]]) -> None:
        if row["op"] == "d":
            self.rows.pop(tuple(row["key"]), None)
        if row["op"] == "u":
            image = dict(row["after"])
            if not row["complete"]:
                image = before[tuple(row["base"] or row["key"])][1] | image
            self.rows[tuple(row["key"])] = (row["position"], row["ordinal"]), image

    @property
    def table(self) -> dict[str, Image]:
        """Key text → image."""
        return {key[0]: image for key, (_, image) in self.rows.items()}


def replay(rows: Iterable[Row]) -> dict[str, Image]:
    """The table after every log row, applied one by one."""
    table: dict[str, tuple[int, Image]] = {}
    moving: Image = {}
    for row in rows:
        if row["address"] not in (None, SINK):
            continue
        key = row["key"][0] if row["key"] else ""
        if row["op"] == "t":
            table.clear()
        elif row["op"] == "g":
            table = {k: held for k, held in table.items() if held[0] >= int(row["payload"])}
        elif row["op"] == "d":
            moving = table.pop(key, (0, {}))[1]
        elif row["op"] in "cru":
            older = moving if row["old_key"] else table.get(key, (0, {}))[1]
            table[key] = row["position"], (older if row["partial"] else {}) | row["after"]
    return {key: image for key, (_, image) in table.items()}
