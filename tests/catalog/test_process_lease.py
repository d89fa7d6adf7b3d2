"""Leases of processes: one replay of a sink at a time, and whether one is running."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.catalog.process_lease import LEASE, is_replay_running, sole_replay
from cdc.errors import SinkInUse


@pytest.fixture(name="catalog")
def _catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog.open(f"sqlite:///{tmp_path / 'catalog.db'}") as catalog:
        yield catalog


def test_a_second_replay_of_a_sink_is_refused(catalog: Catalog) -> None:
    with (
        sole_replay(catalog, "shop", "lake"),
        sole_replay(catalog, "shop", "find"),
        pytest.raises(SinkInUse, match="'lake'"),
        sole_replay(catalog, "shop", "lake"),
    ):
        pass
    with sole_replay(catalog, "shop", "lake"):
        pass


def test_a_replay_is_running_inside_its_block_only(catalog: Catalog) -> None:
    with sole_replay(catalog, "shop", "lake"):
        assert is_replay_running(catalog, "shop", "lake")
        assert not is_replay_running(catalog, "shop", "find")
    assert not is_replay_running(catalog, "shop", "lake")


def test_the_lease_of_a_replay_that_was_killed_on_this_machine_is_void(catalog: Catalog) -> None:
    with subprocess.Popen(["true"]) as killed:
        killed.wait()
    assert catalog.leases.acquire("replay shop/lake", f"{socket.gethostname()} {killed.pid} 0", LEASE)
    assert not is_replay_running(catalog, "shop", "lake")
    with sole_replay(catalog, "shop", "lake"):
        assert is_replay_running(catalog, "shop", "lake")
