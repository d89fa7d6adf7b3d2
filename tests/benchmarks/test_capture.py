"""Capture: all sides get the same stream, in an order that no side gains from."""

from __future__ import annotations

import socket
from collections import Counter

import pytest

from cdc.lsn import Lsn
from cdc.postgres.replication import StreamOptions
from tests.benchmarks.capture import LIMITS, SIDES, order_of_sides
from tests.benchmarks.peers import STREAM_OPTIONS
from tests.benchmarks.raw_socket import END, EndSearch


def test_each_side_is_measured_once_in_a_run_and_at_every_place_over_all_runs() -> None:
    orders = [order_of_sides(workload, number) for workload in LIMITS for number in range(3)]

    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(SIDES))}
    for place in range(len(SIDES)):
        counts = Counter(order[place] for order in orders)
        assert min(counts[side] for side in SIDES) >= len(orders) // 5, f"place {place}: {counts}"
    assert order_of_sides("wide", 1) == order_of_sides("wide", 1)


def test_the_peer_asks_for_the_stream_that_the_reader_asks_for() -> None:
    command = StreamOptions("slot", "publication", Lsn(0)).command(180_000)
    options = command.partition(" (")[2].removesuffix(")").split(", ")
    assert {f"{name} '{value}'" for name, value in STREAM_OPTIONS.items()} == {
        option for option in options if not option.startswith("publication_names")
    }


@pytest.mark.parametrize("cut", [1, 5, len(END)])
def test_the_end_is_found_also_if_two_reads_divide_it(cut: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        search = EndSearch()
        theirs.sendall(b"rows and rows" + END[:cut])
        assert search.read(ours) is (cut == len(END))
        theirs.sendall(END[cut:] + b"more")
        assert search.read(ours) is (cut < len(END))


def test_a_stream_that_ends_before_the_last_change_gives_no_figure() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with pytest.raises(ConnectionError):
            EndSearch().read(ours)
