"""A table without a key as a model: transactions over rows that may be equal, and what a log of them comes to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from cdc.log_row import LOG_SCHEMA
from cdc.postgres.visibility import Visibility

RELATION = 7
FIRST_XID = (1 << 32) - 4
"""The stream tells the low half only, which soon begins anew."""
Image = tuple[tuple[int, str | None], ...]


@dataclass
class Transaction:
    """One of a history; they are numbered in the order of their commits."""

    position: int
    xid: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of the log."""
    steps: list[tuple[int | None, int | None, str]] = field(default_factory=list)
    """(row that goes, row that comes, its value); a truncate has neither row."""
    needs: set[int] = field(default_factory=set)
    """Those whose end it has waited for: it touched what they made, or one of the two emptied the table."""

    def tell(self, op: str, relation: int = RELATION, **images: Any) -> None:
        row = dict.fromkeys(LOG_SCHEMA.names) | {"partial": False, "committed_at": 0, "topic": "shop.t"}
        place = {"position": self.position, "ordinal": len(self.rows), "xid": self.xid % (1 << 32)}
        self.rows.append({**row, **place, "op": op, "relation": relation, **images})


@dataclass
class History:
    """What happened to the table, transaction by transaction."""

    transactions: list[Transaction] = field(default_factory=list)
    held: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Row → who made it, and its value."""
    made: int = 0
    emptied: int | None = None

    def run(self, xid: int, statements: Sequence[tuple[str, str, int]]) -> None:
        """One transaction of statements (kind, new value, which row)."""
        number = len(self.transactions)
        transaction = Transaction(10 * (number + 1), FIRST_XID + xid)
        if self.emptied is not None:
            transaction.needs.add(self.emptied)
        for kind, value, which in statements:
            self._step(transaction, number, kind, value, which)
        self.transactions.append(transaction)
        transaction.needs.discard(number)

    def _step(self, transaction: Transaction, number: int, kind: str, value: str, which: int) -> None:
        if kind == "truncate":
            transaction.tell("t")
            transaction.needs |= set(range(number))
            transaction.steps.append((None, None, ""))
            self.held, self.emptied = {}, number
            return
        gone = None if kind == "insert" or not self.held else list(self.held)[which % len(self.held)]
        if kind != "insert" and gone is None:
            transaction.tell("c", RELATION + 1, after=[(1, value)])
            return
        before = None
        if gone is not None:
            maker, old = self.held.pop(gone)
            transaction.needs.add(maker)
            before = [(1, old)]
        if kind == "delete":
            transaction.tell("d", before=before)
            transaction.steps.append((gone, None, ""))
            return
        self.made += 1
        self.held[self.made] = number, value
        transaction.tell("c" if gone is None else "u", before=before, after=[(1, value)])
        transaction.steps.append((gone, self.made, value))

    def values(self, seen: Iterable[int]) -> list[str]:
        """The table as one sees it who sees those transactions."""
        rows: dict[int, str] = {}
        for number in sorted(seen):
            for gone, come, value in self.transactions[number].steps:
                if gone is come is None:
                    rows.clear()
                if gone is not None:
                    del rows[gone]
                if come is not None:
                    rows[come] = value
        return sorted(rows.values())

    def visibility(self, seen: AbstractSet[int]) -> Visibility:
        """What a snapshot says of itself that sees just those."""
        xmax = max((self.transactions[number].xid for number in seen), default=FIRST_XID - 1) + 1
        unseen = {t.xid for number, t in enumerate(self.transactions) if number not in seen}
        return Visibility(min({xmax, *unseen}), xmax, frozenset(xid for xid in unseen if xid < xmax))


def left_of(rows: Iterable[Mapping[str, Any]]) -> list[Image]:
    """The images that rows of one relation leave, sorted; what goes must have been there."""
    held: dict[Image, list[int]] = {}
    for row in sorted(rows, key=lambda row: (row["position"], row["ordinal"])):
        if row["op"] == "t":
            held.clear()
        elif row["op"] == "g":
            held = {image: [at for at in places if at >= int(row["payload"])] for image, places in held.items()}
        elif row["op"] in {"c", "r", "u", "d"}:
            if row["op"] in {"u", "d"}:
                held[image_of(row["before"])].pop(0)
            if row["op"] != "d":
                held.setdefault(image_of(row["after"]), []).append(row["position"])
    return sorted((image for image, places in held.items() for _ in places), key=repr)


def image_of(told: Any) -> Image:
    """An image of the log as something to compare."""
    return tuple(sorted(dict(told).items()))
