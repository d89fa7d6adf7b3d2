"""Spool: streamed transactions in any order of blocks equal the plain ones that their commits make of them."""

from __future__ import annotations

import resource
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from cdc.capture.spool import BATCH, Spool
from cdc.errors import LogUnwritable, MalformedFrame, Reaction
from cdc.lsn import Lsn
from cdc.pgoutput.message_parser import FrameBatch
from cdc.pgoutput.messages import (
    AnyMessage,
    BeginMessage,
    CommitMessage,
    Insert,
    Keepalive,
    Message,
    OriginMessage,
    Truncate,
    Type,
)
from tests.fixtures.examples import examples
from tests.pgoutput.encode import (
    POSTGRES_EPOCH,
    frame,
    in_block,
    stream_abort,
    stream_commit,
    stream_start,
    stream_stop,
)
from tests.pgoutput.streams import ORDERS, relation, table, transaction

bounded = examples(40, suppress_health_check=list(HealthCheck))
RENAMED = table(1, name="renamed")
KEEPALIVE = Keepalive(Lsn(3), False)


@dataclass(slots=True)
class Wire:
    """What a server sends, and what it amounts to."""

    sent: list[bytes] = field(default_factory=list)
    expected: list[bytes] = field(default_factory=list)
    _open: dict[int, list[tuple[int, AnyMessage]]] = field(default_factory=dict)
    _rolled_back: dict[int, int] = field(default_factory=dict)
    _lsn: int = 0

    def plain(self, messages: Iterable[AnyMessage]) -> None:
        """Messages outside of blocks."""
        frames = [frame(message) for message in messages]
        self.sent += frames
        self.expected += frames

    def commits(self, *messages: AnyMessage) -> None:
        """A plain transaction."""
        self._lsn += 10
        self.plain(transaction(self._lsn, *messages, xid=5))

    def block(self, xid: int, *rows: tuple[int, AnyMessage]) -> None:
        """A block of rows, each with its (sub)xid; keepalives among them are nobody's."""
        self.sent.append(stream_start(xid, first=xid not in self._open))
        for subxid, message in rows:
            self.sent.append(in_block(subxid, message))
            if isinstance(message, Keepalive):
                self.expected.append(frame(message))
            else:
                self._open.setdefault(xid, []).append((subxid, message))
        self._open.setdefault(xid, [])
        self.sent.append(stream_stop())

    def rollback(self, xid: int, subxid: int, *, told: bool = True) -> None:
        """One subtransaction, or all."""
        self.sent.append(stream_abort(xid, subxid, told=told))
        rows = [row for row in self._open.pop(xid) if row[0] != subxid]
        self._rolled_back[xid] = max(self.latest(xid) - 1, subxid)
        if subxid != xid:
            self._open[xid] = rows

    def commit(self, xid: int) -> None:
        """The end of a streamed transaction."""
        self._lsn += 10
        at = POSTGRES_EPOCH + self._lsn
        self.sent.append(stream_commit(xid, self._lsn, self._lsn + 8, at))
        messages = [message for _, message in self._open.pop(xid)]
        ends = BeginMessage(Lsn(self._lsn), at, xid), CommitMessage(Lsn(self._lsn), Lsn(self._lsn + 8), at)
        self.expected += [frame(message) for message in (ends[0], *messages, ends[1])]

    def latest(self, xid: int) -> int:
        """The first subxid behind all that were rolled back."""
        return self._rolled_back.get(xid, xid) + 1

    @property
    def open(self) -> list[int]:
        """Xids that have not ended."""
        return list(self._open)


_messages = st.one_of(
    st.builds(Insert, st.just(1), st.tuples(st.text(max_size=4))),
    st.just(Truncate((1, 2), True, False)),
    st.builds(
        Message, st.just(True), st.just(Lsn(4)), st.just("audit"), st.binary(max_size=4), st.just(POSTGRES_EPOCH)
    ),
    st.just(Type(99, "shop", "mood")),
    st.just(OriginMessage(Lsn(9), "elsewhere")),
    st.just(KEEPALIVE),
)
_aside = st.just(Message(False, Lsn(4), "audit", b"x", POSTGRES_EPOCH))


@st.composite
def wires(draw: st.DrawFn) -> Wire:
    """Blocks of up to three transactions, each with subtransactions, between plain ones."""
    wire = Wire()
    for _ in range(draw(st.integers(0, 15))):
        xid = draw(st.sampled_from([100, 200, 300]))
        step = draw(st.sampled_from(["plain", "aside", "block", "block", "rollback", "commit"]))
        # a subtransaction that was rolled back does nothing more
        subxids = st.sampled_from([xid, *range(wire.latest(xid), wire.latest(xid) + 3)])
        if step == "plain":
            wire.commits(*draw(st.lists(_messages, max_size=3)))
        elif step == "aside":
            wire.plain([draw(st.one_of(_aside, st.just(KEEPALIVE)))])
        elif step == "block":
            # Origin carries no xid: only the transaction as a whole can take it back
            rows = draw(st.lists(st.tuples(subxids, _messages), max_size=5))
            wire.block(xid, *((xid if isinstance(row, OriginMessage) else sub, row) for sub, row in rows))
        elif xid in wire.open and step == "rollback":
            wire.rollback(xid, draw(subxids), told=draw(st.booleans()))
        elif xid in wire.open:
            wire.commit(xid)
    return wire


def through(spool: Spool, frames: Sequence[bytes], cuts: Iterable[int] = ()) -> list[bytes]:
    """What the spool makes of frames, fed in batches that end at the cuts."""
    edges = [0, *sorted(cut for cut in cuts if cut < len(frames)), len(frames)]
    batches = [frames[a:b] for a, b in pairwise(edges)]
    return [one for batch in batches for whole in spool.committed(FrameBatch.of(batch)) for one in whole]


@contextmanager
def spool_in(folder: Path | None = None) -> Iterator[Spool]:
    spool = Spool(folder)
    try:
        yield spool
    finally:
        spool.close()


@bounded
@given(wires(), st.lists(st.integers(0, 60), max_size=6))
def test_blocks_in_any_order_and_batches_of_any_size_equal_the_plain_form(wire, cuts):
    with spool_in() as spool:
        assert through(spool, wire.sent, cuts) == wire.expected
        assert (spool.nbytes > 0) <= bool(wire.open)


@bounded
@given(wires())
def test_frame_by_frame_equals_the_plain_form(wire):
    with spool_in() as spool:
        assert through(spool, wire.sent, range(1, len(wire.sent))) == wire.expected


def test_a_stream_without_blocks_passes_untouched():
    wire = Wire()
    wire.commits(relation(ORDERS), Insert(1, ("1", "a", "b")), KEEPALIVE)
    frames = FrameBatch.of(wire.sent)
    with spool_in() as spool:
        assert [whole is frames for whole in spool.committed(frames)] == [True]


def test_keepalives_and_plain_transactions_do_not_wait_for_a_block_to_end():
    wire = Wire()
    wire.block(100, (100, Insert(1, ("1",))), (0, KEEPALIVE))
    wire.commits(Insert(1, ("2",)))
    with spool_in() as spool:
        assert through(spool, wire.sent) == wire.expected
        assert wire.expected[0] == frame(KEEPALIVE)


def test_what_waits_is_on_disk_and_its_space_is_given_back(tmp_path):
    wire, text = Wire(), "x" * 1000
    for _ in range(9):
        wire.block(100, *[(100, Insert(1, (text,)))] * 1000)
    held = len(wire.sent)
    wire.commit(100)
    with spool_in(tmp_path) as spool:
        through(spool, wire.sent[:held])
        assert spool.nbytes > 9_000_000
        assert list(tmp_path.iterdir()) == []
        batches = list(spool.committed(FrameBatch.of(wire.sent[held:])))
        assert [one for batch in batches for one in batch] == wire.expected
        assert max(batch.nbytes for batch in batches) < BATCH * 1.5
        assert spool.nbytes == 0


def test_only_a_replay_is_a_replay():
    wire = Wire()
    wire.block(100, (100, Insert(1, ("1",))))
    wire.commit(100)
    wire.commits(Insert(1, ("2",)))
    with spool_in() as spool:
        seen = [(whole[0][25:26], spool.is_replaying) for whole in spool.committed(FrameBatch.of(wire.sent))]
    assert seen == [(b"B", True), (b"I", True), (b"C", True), (b"B", False)]


def described(frames: Sequence[bytes]) -> list[bytes]:
    with spool_in() as spool:
        return [one for one in through(spool, frames) if one[25:26] == b"R"]


def test_a_description_that_came_after_the_replayed_one_is_given_out_again():
    wire = Wire()
    wire.block(100, (100, relation(ORDERS)), (100, Insert(1, ("1",))))
    wire.commits(relation(RENAMED), Insert(1, ("2",)))
    wire.commit(100)
    assert described(wire.sent) == [frame(relation(schema)) for schema in (RENAMED, ORDERS, RENAMED)]


def test_a_description_of_another_streamed_transaction_counts_from_when_it_came():
    wire = Wire()
    wire.block(100, (100, relation(ORDERS)), (100, Insert(1, ("1",))))
    wire.block(200, (200, relation(RENAMED)), (200, Insert(1, ("2",))))
    wire.commit(200)
    wire.commit(100)
    assert described(wire.sent) == [frame(relation(schema)) for schema in (RENAMED, ORDERS, RENAMED)]


def test_a_description_that_was_rolled_back_leaves_nothing():
    wire = Wire()
    wire.block(100, (100, relation(ORDERS)), (100, Insert(1, ("1",))), (101, relation(RENAMED)))
    wire.rollback(100, 101)
    wire.block(200, (200, relation(RENAMED)))
    wire.rollback(200, 200)
    wire.commit(100)
    assert described(wire.sent) == [frame(relation(ORDERS))]


def test_a_repeated_description_is_later_than_what_came_between():
    wire = Wire()
    wire.block(100, (101, relation(ORDERS)), (102, Insert(1, ("1",))))
    wire.commits(relation(RENAMED), Insert(1, ("2",)))
    wire.rollback(100, 102)
    wire.block(100, (103, relation(ORDERS)), (103, Insert(1, ("3",))))
    wire.commit(100)
    assert described(wire.sent) == [frame(relation(schema)) for schema in (RENAMED, ORDERS, ORDERS)]


def test_a_description_falls_back_to_the_one_before_those_that_were_rolled_back():
    wire = Wire()
    wire.block(100, (100, relation(ORDERS)), (101, relation(RENAMED)))
    wire.rollback(100, 101)
    wire.block(200, (200, relation(RENAMED)), (200, Insert(1, ("1",))))
    wire.commit(200)
    wire.commit(100)
    assert described(wire.sent) == [frame(relation(schema)) for schema in (RENAMED, ORDERS, RENAMED)]


def test_rollbacks_by_the_thousand_cost_a_few_bytes_each():
    wire, number = Wire(), 2_000
    for subxid in range(101, 101 + number):
        wire.block(100, (subxid, relation(ORDERS)), (subxid, Insert(1, (str(subxid),))))
        if subxid % 2:
            wire.rollback(100, subxid)
    wire.commit(100)
    with spool_in() as spool:
        through(spool, wire.sent[:-1])  # compiles and imports what the first call needs
    with spool_in() as spool:
        tracemalloc.start(5)
        through(spool, wire.sent[:-1])
        # other threads of the test run allocate memory as well: count what a call of the spool has allocated
        own = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(inclusive=True, filename_pattern="*/cdc/capture/spool.py", all_frames=True)]
        )
        tracemalloc.stop()
        assert 0 < sum(trace.size for trace in own.traces) < 20 * number
        replayed = through(spool, wire.sent[-1:])
    assert [one for one in replayed if one[25:26] != b"R"] == [one for one in wire.expected if one[25:26] != b"R"]


@pytest.mark.parametrize(
    "frames",
    [
        [stream_stop()],
        [stream_start(1, first=False)],
        [stream_commit(1, 2, 3, POSTGRES_EPOCH)],
        [stream_start(1, first=True), stream_start(2, first=True)],
        [stream_start(1, first=True), stream_commit(1, 2, 3, POSTGRES_EPOCH)],
        [stream_start(1, first=True), stream_stop(), stream_start(1, first=True)],
        [stream_start(1, first=True), frame(relation(ORDERS))[:26]],
    ],
    ids=["stop", "second", "commit", "nested", "open", "first", "no-xid"],
)
def test_stream_messages_out_of_place_are_malformed(frames):
    with spool_in() as spool, pytest.raises(MalformedFrame):
        through(spool, frames)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file of this process grows beyond size bytes meanwhile, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_that_is_retried(tmp_path):
    wire = Wire()
    wire.block(100, *[(100, Insert(1, ("x" * 1000,)))] * 200)
    with spool_in(tmp_path) as spool, files_up_to(100_000), pytest.raises(LogUnwritable, match="too large") as caught:
        through(spool, wire.sent)
    assert caught.value.reaction is Reaction.RETRY


def test_a_folder_that_is_gone_is_named(tmp_path):
    wire = Wire()
    wire.block(100, (100, Insert(1, ("1",))))
    with spool_in(tmp_path / "gone") as spool, pytest.raises(LogUnwritable, match="gone"):
        through(spool, wire.sent)


def open_files() -> list[Path]:
    """Of this process."""
    return list(Path("/proc/self/fd").iterdir())


def test_no_file_stays_open_behind_a_closed_spool(tmp_path):
    wire, before = Wire(), open_files()
    for xid in (100, 200):
        wire.block(xid, (xid, Insert(1, ("1",))))
    spool = Spool(tmp_path)
    through(spool, wire.sent)
    assert len(open_files()) == len(before) + 2
    spool.close()
    assert len(open_files()) == len(before)
