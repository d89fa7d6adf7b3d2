"""Tables that are copied in chunks while they change: a source in plain Python, and its rows in the log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from cdc.table import Column, ReplicaIdentity, TableSchema, TableState
from tests.pipelines.fold_model import KEY_COLUMN, LARGE, PLAIN, Image, Row, Source

FIRST = 1_000
"""Position of the first transaction; the others follow one by one."""
KEYS = tuple("12345678")


def schema_of(relation: int, state: TableState = TableState.LIVE, reason: str | None = None) -> TableSchema:
    """A version of table `t.<relation>`: a key and three columns, all text."""
    columns = tuple(
        Column(id=n, name=f"c{n}", type_oid=25, type_name="text", key=0 if n == KEY_COLUMN else None)
        for n in (KEY_COLUMN, PLAIN, *LARGE)
    )
    return TableSchema(
        relation=relation,
        oid=relation,
        schema="t",
        name=str(relation),
        replica_identity=ReplicaIdentity.DEFAULT,
        columns=columns,
        state=state,
        reason=reason,
    )


@dataclass(frozen=True)
class Moment:
    """One transaction: what it left in the log, and how the table stood after it."""

    rows: list[Row]
    state: TableState | None
    """In the log; None before the table was ever seen."""
    table: dict[str, Image]
    exact: bool
    """Whether the log says all of it: not during a copy, nor after changes that nobody saw."""
    first: bool
    """Whether it is being copied for the first time: nothing from before can be in a target."""


@dataclass
class CopiedTable(Source):
    """A table whose copy and changes take turns, as the reader places them; `story` is what happened."""

    story: list[Moment] = field(default_factory=list)
    position: int = FIRST
    state: TableState | None = None
    exact: bool = False
    copies: int = 0
    whole: set[str] = field(default_factory=set)
    """Keys of which the log has a whole image since the copy began."""
    slots: dict[str, int] = field(default_factory=dict)
    """Where each row lies on disk; an updated one may lie elsewhere afterwards."""
    _left: bool = False

    def live(self) -> CopiedTable:
        """A first copy, changes, and for every other table changes that nobody saw and a second copy."""
        self.unseen(self.random.randint(3, 8))
        self._idle(self.random.randint(0, 3))
        self.copy()
        self.changes(self.random.randint(1, 3))
        if self.random.random() < 0.5:
            self.exact = False
            self.unseen(3)
            self._idle(1)
            self.copy()
            self.changes(self.random.randint(1, 3))
        return self

    def unseen(self, count: int) -> None:
        """Changes that leave nothing in the log."""
        for _ in range(count):
            self.random.choice((self._put, self._put, self._change, self._delete))()
        self.log.clear()

    def changes(self, count: int) -> list[Row]:
        """Transactions of one to three random changes; returns their rows."""
        found: list[Row] = []
        for _ in range(count):
            for _ in range(self.random.randint(1, 3)):
                self.random.choices((self._put, self._change, self._delete, self._move), (2, 5, 1, 4))[0]()
            if self.random.random() < 0.03:
                self._truncate()
            found += self.log
            self.commit()
        return found

    def copy(self) -> None:
        """The whole copy, by physical blocks or by key, with changes before, after and inside of its chunks."""
        self.exact, began = False, self.position
        self.copies += 1
        self.whole.clear()
        self.slots = {key: place for place, key in enumerate(self.random.sample(sorted(self.table), len(self.table)))}
        self.mark(TableState.SNAPSHOTTING)
        self.commit()
        for keys in self._by_blocks() if self.random.random() < 0.5 else self._by_key():
            self._chunk(keys)
            self.changes(self.random.randint(0, 1))
        while lacking := [key for key in self.table if key not in self.whole]:
            self._chunk(lacking)
        self.mark(TableState.LIVE)
        self._row("g", payload=str(began).encode())
        self.exact = True
        self.commit()

    def mark(self, state: TableState, reason: str | None = None) -> None:
        """A new version of the schema."""
        self.state = state
        self._row("s", payload=schema_of(self.relation, state, reason).to_json())

    def commit(self) -> None:
        """End the transaction."""
        table = {key: dict(image) for key, image in self.table.items()}
        first = self.copies == 1 and self.state is TableState.SNAPSHOTTING
        self.story.append(Moment(list(self.log), self.state, table, self.exact, first))
        self.log.clear()
        self.position += 1

    def _idle(self, count: int) -> None:
        for _ in range(count):
            self.commit()

    def _by_blocks(self) -> Iterator[list[str]]:
        end, first = len(self.slots), 0
        while first < end:
            last = first + self.random.randint(1, 3)
            yield [key for key, place in self.slots.items() if first <= place < min(last, end)]
            first = last

    def _by_key(self) -> Iterator[list[str]]:
        after = ""
        while keys := sorted(key for key in self.table if key > after)[: self.random.randint(1, 3)]:
            after = keys[-1]
            yield keys

    def _chunk(self, keys: list[str]) -> None:
        """Read rows, and place them after what happened meanwhile."""
        held = {key: dict(self.table[key]) for key in keys}
        for row in self.changes(self.random.randint(0, 2)):
            key = row["key"][0] if row["key"] else ""
            if row["op"] == "t":
                held.clear()
            elif row["partial"] and key in held:
                held[key] |= row["after"]
            else:
                held.pop(key, None)
        for key, image in held.items():
            self._row("r", key=[key], after=image)
        self.commit()

    def _free(self) -> list[str]:
        return [key for key in KEYS if key not in self.table]

    def _row(self, op: str, **fields: Any) -> None:
        super()._row(op, **fields)
        row = self.log[-1]
        if op == "t":
            self.whole.clear()
            self.slots.clear()
        if not row["key"]:
            return
        key = row["key"][0]
        if op == "d":
            self._left = key in self.whole
            self.whole.discard(key)
            self.slots.pop(key, None)
        elif not row["partial"] or (row["old_key"] and self._left):
            self.whole.add(key)
        if op in "cu" and (key not in self.slots or self.random.random() < 0.7):
            self.slots[key] = len(KEYS) * len(self.story) + len(self.log)


def merge_transactions(tables: list[CopiedTable]) -> list[list[Row]]:
    """What all tables left in the log, transaction by transaction, with places."""
    length = max(len(table.story) for table in tables)
    moments = [[row for t in tables if n < len(t.story) for row in t.story[n].rows] for n in range(length)]
    return [[{**row, "ordinal": place} for place, row in enumerate(rows)] for rows in moments]


def random_copied_tables(seed: int, count: int) -> list[CopiedTable]:
    """Tables with a random story each."""
    return [CopiedTable(number, Random(f"{seed} {number}")).live() for number in range(1, count + 1)]
