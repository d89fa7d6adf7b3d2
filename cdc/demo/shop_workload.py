"""The shop of the demo: creates its tables from SQL files, and writes a workload of transactions at a given rate.

Tests and benchmarks use the workload too. Two workloads with the same seed write the same transactions in the same
order. `run` writes a number of transactions at full speed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from importlib.resources import files
from random import Random
from threading import Event, Lock, Thread
from time import monotonic
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from cdc.log_row import HEARTBEAT_PREFIX
from cdc.lsn import Lsn
from cdc.postgres.connection import connect
from cdc.postgres.logical_messages import emit_message

REFILL_EVERY: Final = 400
"""Number of transactions between two TRUNCATEs of shop.carts: about five seconds at the default rate."""
CARTS: Final = 50
_SEEDED: Final = MappingProxyType({"customers": 1000, "products": 200, "orders": 5000, "notes": 60, "events": 2000})
_WORDS: Final = (
    "blue mug", "naïve café", "a\ttab and a\nline", "back\\slash \\N", "it's \"quoted\"",
    "", "東京 🚲", "NULL", "{a,b}", " padded ",
)  # fmt: skip
_CENT: Final = 100
_BODY_BYTES: Final = (9_000, 20_000)
"""Minimum and maximum bytes of a note's body: more than the 8 kB page, so the body is always stored out of line."""
_NAME: Final = re.compile(r"^-- name: (\w+)\n(?:--.*\n)+", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class WorkloadCounters:
    """Numbers of transactions and changes that the workload has committed so far."""

    transactions: int
    changes: int
    """Number of rows inserted, updated and deleted; each TRUNCATE counts as one."""
    altered: bool
    """True once the schema change has happened."""


class Workload:
    """Writes transactions to the shop over one connection, in a thread of its own or in the calling thread.

    An error in the thread ends the thread; `stop` raises that error.
    """

    def __init__(self, dsn: str, rate: float = 200.0, seed: int = 1, *, alter_after: float | None = None) -> None:
        self._connection = connect(dsn, application_name="cdc demo workload")
        self._sql = named_statements("workload")
        self._rate = rate
        self._alter_after = alter_after
        self._random = Random(seed)  # noqa: S311 - nothing secret is drawn
        self._notes = [f"note-{n}" for n in range(1, _SEEDED["notes"] + 1)]
        self._customers, self._orders = _SEEDED["customers"], _SEEDED["orders"]
        self._events = _SEEDED["events"]
        self._transactions = self._changes = self._uncommitted = self._names = 0
        self._altered = False
        self._lock = Lock()
        self._stop = Event()
        self._failure: Exception | None = None
        self._thread = Thread(target=self._write_at_rate, name="workload", daemon=True)
        self._actions: tuple[tuple[Callable[[], None], int], ...] = (
            (self._place, 50), (self._advance, 60), (self._cancel, 8), (self._join, 6), (self._edit_customer, 20),
            (self._edit_product, 10), (self._star_note, 20), (self._rewrite_note, 4), (self._write_note, 4),
            (self._move_note, 1), (self._drop_note, 2), (self._record_event, 40), (self._move_event, 5),
            (self._drop_event, 5), (self._roll_back, 6), (self._save_points, 6),
            (self._replace_cart, 5), (self._swap_carts, 3),
        )  # fmt: skip

    @property
    def counters(self) -> WorkloadCounters:
        """Return the current counters; safe to call from any thread."""
        with self._lock:
            return WorkloadCounters(self._transactions, self._changes, self._altered)

    def start(self) -> None:
        """Start the thread, which writes `rate` changes per second."""
        self._thread.start()

    def stop(self) -> WorkloadCounters:
        """Stop the thread after its transaction, and close the connection. Raises an error that ended the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._connection.close()
        if self._failure is not None:
            raise self._failure
        return self.counters

    def run(self, transactions: int) -> WorkloadCounters:
        """Write this number of transactions in the calling thread at full speed; not allowed after `start`."""
        for _ in range(transactions):
            self._write_transaction()
        return self.counters

    def alter(self) -> None:
        """Add a column to shop.orders, as the demo's schema change; only the writing thread may call this method."""
        self._in_transaction(lambda: self._do("add_column"))
        with self._lock:
            self._altered = True

    def _write_at_rate(self) -> None:
        began = monotonic()
        try:
            while not self._stop.is_set():
                if self._alter_after is not None and not self._altered and monotonic() - began >= self._alter_after:
                    self.alter()
                self._write_transaction()
                ahead = self._changes / self._rate - (monotonic() - began)
                if ahead > 0:
                    self._stop.wait(ahead)
        except Exception as error:  # noqa: BLE001 - kept for stop, which raises it
            self._failure = error

    def _write_transaction(self) -> None:
        if self._transactions % REFILL_EVERY == REFILL_EVERY // 4:
            return self._in_transaction(self._refill)
        actions, weights = zip(*self._actions, strict=True)
        action = self._random.choices(actions, weights)[0]
        if action == self._roll_back:  # opens the outermost transaction itself, so it must not run inside another one
            return action()
        return self._in_transaction(action)

    def _in_transaction(self, action: Callable[[], object]) -> None:
        self._uncommitted = 0
        with self._connection.transaction():
            action()
        with self._lock:
            self._transactions += 1
            self._changes += self._uncommitted

    def _do(self, name: str, /, **parameters: object) -> int | None:
        """Run a named statement and return the number in its first result row; None if it returns no row."""
        cursor = self._connection.execute(self._sql[name], parameters)
        self._uncommitted += max(
            cursor.rowcount, 1 if name == "empty_carts" else 0
        )  # other DDL has -1, which counts as none
        row: Any = cursor.fetchone() if cursor.description else None
        return None if row is None else int(row[0])

    # -- orders -----------------------------------------------------------------------------------

    def _place(self) -> None:
        r = self._random
        price = r.randrange(300, 20_000) / _CENT
        how_many = r.randint(1, 5)
        customer = r.randint(1, self._customers)
        comment = r.choice((None, *_WORDS))
        lines = [(r.randint(1, _SEEDED["products"]), r.randint(1, 4)) for _ in range(how_many)]
        total = price * sum(quantity for _, quantity in lines)
        order = self._do("place_order", customer=customer, total=total, comment=comment)
        for line, (product, quantity) in enumerate(lines, start=1):
            self._do("add_item", order=order, line=line, product=product, quantity=quantity, price=price)
            self._do("take_stock", product=product, quantity=1)
        self._orders = max(self._orders, order or 0)

    def _advance(self) -> None:
        order = self._some_order()
        self._do("advance_order", order=order)
        self._do(
            "charge_customer",
            customer=self._random.randint(1, self._customers),
            amount=self._random.randrange(9999) / _CENT,
        )
        if self._altered and self._random.random() < 1 / 2:
            self._do("write_gift_note", order=order, words=self._random.choice((None, *_WORDS)))

    def _cancel(self) -> None:
        order = self._some_order()
        self._do("drop_items", order=order)
        self._do("drop_order", order=order)

    def _some_order(self) -> int:
        """Return the id of a random order, mostly a recent one; the order may no longer exist."""
        low = 1 if self._random.random() < 1 / 3 else max(1, self._orders - 500)
        return self._random.randint(low, self._orders)

    # -- customers and products -------------------------------------------------------------------

    def _join(self) -> None:
        self._names += 1
        drawn = UUID(int=self._random.getrandbits(128), version=4)
        new = self._do("join_shop", public_id=drawn, email=f"{drawn}@shop.example", **self._person())
        self._customers = max(self._customers, new or 0)

    def _edit_customer(self) -> None:
        self._do("edit_customer", customer=self._random.randint(1, self._customers), **self._person())

    def _person(self) -> dict[str, object]:
        r = self._random
        profile = {"visits": r.randrange(10**12), "city": r.choice(_WORDS), "scores": [r.random(), None, True]}
        return {
            "name": r.choice(_WORDS),
            "tags": r.sample(_WORDS, r.randint(0, 4)),
            "profile": r.choice((None, json.dumps(profile))),
            "avatar": r.choice((None, b"", r.randbytes(48))),
        }

    def _edit_product(self) -> None:
        r = self._random
        self._do(
            "edit_product",
            product=r.randint(1, _SEEDED["products"]),
            price=r.randrange(1, 10**8) / _CENT,
            words=r.choice((None, *_WORDS)),
            sizes=r.choice((None, [], [36, None, 40])),
            weight=r.choice((None, r.random(), 1e-300, float("inf"))),
        )

    # -- notes: values that an update need not send -----------------------------------------------

    def _star_note(self) -> None:
        self._do("star_note", slug=self._random.choice(self._notes))

    def _rewrite_note(self) -> None:
        self._do("rewrite_note", slug=self._random.choice(self._notes), body=self._body())

    def _write_note(self) -> None:
        slug = self._new_slug()
        self._do("write_note", slug=slug, title=self._random.choice(_WORDS), body=self._body())
        self._notes.append(slug)

    def _move_note(self) -> None:
        place = self._random.randrange(len(self._notes))
        to = self._new_slug()
        self._do("move_note", slug=self._notes[place], to=to)
        self._notes[place] = to
        self._do("star_note", slug=to)

    def _drop_note(self) -> None:
        if len(self._notes) > 1:
            self._do("drop_note", slug=self._notes.pop(self._random.randrange(len(self._notes))))

    def _new_slug(self) -> str:
        self._names += 1
        return f"note {self._names} {self._random.choice(_WORDS)}"

    def _body(self) -> str:
        return self._random.randbytes(self._random.randint(*_BODY_BYTES) // 2).hex()

    # -- events: a partitioned table, published as one --------------------------------------------

    def _record_event(self) -> None:
        detail = json.dumps({"page": self._random.choice(_WORDS)})
        new = self._do(
            "record_event", day=self._day(), kind=self._random.choice(("view", "search", "login")), detail=detail
        )
        self._events = max(self._events, new or 0)

    def _move_event(self) -> None:
        self._do("move_event", event=self._random.randint(1, self._events), day=self._day())

    def _drop_event(self) -> None:
        self._do("drop_event", event=self._random.randint(1, self._events))

    def _day(self) -> date:
        return (datetime(2025, 6, 1, tzinfo=UTC) + timedelta(days=self._random.randrange(700))).date()

    # -- transactions of unusual shape ------------------------------------------------------------

    def _roll_back(self) -> None:
        before = self._uncommitted, self._orders
        with self._connection.transaction(force_rollback=True):
            self._place()
        self._uncommitted, self._orders = before

    def _save_points(self) -> None:
        self._join()
        self._roll_back()
        self._advance()

    def _replace_cart(self) -> None:
        cart = self._random.randint(1, CARTS)
        self._do("drop_cart", cart=cart)
        for _ in range(2):
            self._do("put_cart", cart=cart, customer=self._random.randint(1, self._customers))

    def _swap_carts(self) -> None:
        one, other = self._random.sample(range(1, CARTS + 1), 2)
        for cart, to in ((one, -1), (other, one), (-1, other)):
            self._do("move_cart", cart=cart, to=to)

    def _refill(self) -> None:
        self._do("empty_carts")
        self._do("fill_carts", salt=self._random.randrange(1000), carts=CARTS)


def script_text(name: str) -> str:
    """Return the text of a file of this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def script(name: str) -> bytes:
    """Return the text of an SQL file, which one `execute` without parameters can run."""
    return script_text(f"{name}.sql").encode()


def named_statements(name: str) -> dict[str, bytes]:
    """Return the statements of an SQL file by the names in their `-- name:` lines."""
    pieces = _NAME.split(script_text(f"{name}.sql"))[1:]
    return {title: text.strip().encode() for title, text in zip(pieces[::2], pieces[1::2], strict=True)}


def write_marker(dsn: str, why: str) -> Lsn:
    """Write a logical message to the end of the WAL, and return the LSN where the message ends.

    All transactions that committed before the call precede the message.
    """
    with connect(dsn, application_name="cdc demo") as connection:
        return emit_message(connection, HEARTBEAT_PREFIX, why)


def make_shop(dsn: str) -> None:
    """Create the shop's tables in an empty database and insert its first rows."""
    with connect(dsn, application_name="cdc demo") as connection:
        for name in ("shop", "seed"):
            connection.execute(script(name))
