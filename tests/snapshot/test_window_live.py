"""One window on a real server in which every short history happens to a row, before the snapshot and behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, LiteralString

import pytest

from cdc.postgres.connection import connect
from cdc.snapshot.backfill_documents import BACKFILL, BackfillRequest
from cdc.snapshot.watermark_window import Chunk
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql
from tests.snapshot.reader_with_backfills import Running
from tests.snapshot.window_hooks import Moments

# a row is told by its number; where it stands its key is that or the negative of it
CHANGES: Final[dict[str, LiteralString]] = {
    "insert": "INSERT INTO t VALUES (%(row)s, %(said)s, repeat('i', 2500) || %(said)s)",
    "full": "UPDATE t SET v = %(said)s, long = repeat('f', 2500) || %(said)s WHERE id IN (%(row)s, -%(row)s)",
    # no place for that in its block: the next version lies where no part of a copy by blocks reads
    "short": "UPDATE t SET v = repeat('s', 300) || %(said)s WHERE id IN (%(row)s, -%(row)s)",
    "move": "UPDATE t SET id = -id WHERE id IN (%(row)s, -%(row)s)",
    "delete": "DELETE FROM t WHERE id IN (%(row)s, -%(row)s)",
}
History = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """What happens to one row."""

    there: bool
    """From before the window."""
    before: History
    """Received with the window open, and seen by the snapshot."""
    behind: History
    """Not seen by the snapshot, and in the stream before the watermark."""


def histories(there: bool) -> Iterator[tuple[History, bool]]:
    """All of up to two changes, and whether the row is there afterwards."""
    yield (), there
    for first in ("full", "short", "move", "delete") if there else ("insert",):
        left = first != "delete"
        yield (first,), left
        for second in ("full", "short", "move", "delete") if left else ("insert",):
            yield (first, second), second != "delete"


CASES: Final = [
    Case(there, before, behind)
    for there in (True, False)
    for before, left in histories(there)
    for behind, _ in histories(left)
]


class Window(Moments):
    """Lets all the cases happen in the first window of a chunk."""

    def __init__(self, dsn: str, *, armed: bool) -> None:
        """armed: whether the first window is a chunk's; else it is that of the version which a copy begins with."""
        super().__init__(opened=self._before, in_hand=self._behind)
        self._dsn, self._armed = dsn, armed
        self.begun = self.ended = False

    def _before(self) -> None:
        if self._armed and not self.begun:
            self.begun = True
            self._run([case.before for case in CASES], "before")

    def _behind(self, chunk: Chunk) -> None:
        self._armed = True
        if self.begun and not self.ended:
            assert chunk.rows.num_rows
            self.ended = True
            self._run([case.behind for case in CASES], "behind")

    def _run(self, what: list[History], when: str) -> None:
        with connect(self._dsn) as conn:
            for place in range(2):
                for row, history in enumerate(what, start=1):
                    if place < len(history):
                        conn.execute(CHANGES[history[place]], {"row": row, "said": f"{when} {place}"})


def captured(folder: Path, dsn: str, mode: str) -> Captured:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, v text, long text)",
        "ALTER TABLE t ALTER long SET STORAGE EXTERNAL",
    )
    with connect(dsn) as conn:
        for row, case in enumerate(CASES, start=1):
            if case.there:
                conn.execute(CHANGES["insert"], {"row": row, "said": "first"})
    held = Captured(folder, dsn)
    with held.path.open("a") as definition:
        definition.write(f"snapshot: {{{mode}parallel: 1}}\n")
    return held


def wrong(held: Captured, *, but: str = "") -> dict[int, tuple[Case, object, object]]:
    """Rows of which the log tells something else than there is: the case, what is told, what there is."""
    told = {abs(int(row[0] or 0)): row for row in held.folded("t")}
    true = {abs(int(row[0])): row for row in rows_of(held.dsn, "SELECT id::text, v, long FROM t")}
    return {
        row: (case, told.get(row), true.get(row))
        for row, case in enumerate(CASES, start=1)
        if told.get(row) != true.get(row) and but not in (*case.before, *case.behind)
    }


def test_every_history_in_the_window_of_a_first_copy_ends_in_the_sources_state(tmp_path: Path, database: str) -> None:
    held = captured(tmp_path, database, "beside: 0, ")
    window = Window(database, armed=False)
    with Running(held, window) as running:
        running.until(lambda: (jobs := running.catalog.commands.ls("held", BACKFILL)) and jobs[0].state == "done")
        running.caught_up()
    assert window.ended
    assert not wrong(held)


ASKED: Final = {
    "by blocks": BackfillRequest(("public.t",)),
    "a range by key": BackfillRequest(("public.t",), first=(str(-len(CASES)),), last=(str(len(CASES)),)),
    "listed": BackfillRequest(
        ("public.t",), keys=tuple((str(key),) for key in range(-len(CASES), len(CASES) + 1) if key)
    ),
}


@pytest.mark.parametrize(
    ("asked", "mode"),
    [
        pytest.param(asked, mode, marks=() if mode and asked == "a range by key" else pytest.mark.slow)
        for asked in ASKED
        for mode in ("", "mode: no_data, ")
    ],
)
def test_every_history_in_the_window_of_a_backfill_ends_in_the_sources_state(
    tmp_path: Path, database: str, asked: str, mode: str
) -> None:
    """The first copy above reads by blocks.

    Where the log knew nothing, a row that moved to a listed key took nothing with it: a sink asks for such a row.
    """
    held = captured(tmp_path, database, mode)
    held.copy()
    window = Window(database, armed=True)
    with Running(held, window) as running:
        assert running.ended(running.ask(ASKED[asked])).state == "done"
        running.caught_up()
    assert window.ended
    found = wrong(held, but="move" if mode and asked == "listed" else "")
    assert not found
